/* CRC-32C (Castagnoli) of bytes in memory. Knows no Python, no files. Any number of threads may call these functions at once.
 *
 * `crc` is 0, or the CRC of the bytes before: crc32c(crc32c(0, a), b) is the CRC of a followed by b. */
#ifndef AIO_EXT_CRC32C_H
#define AIO_EXT_CRC32C_H

#include <stddef.h>
#include <stdint.h>

uint32_t crc32c(uint32_t crc, const void *memory, size_t nbytes);          /* with the processor's instructions, if any */
uint32_t crc32c_copy(uint32_t crc, void *to, const void *from, size_t nbytes); /* copies the bytes, too */
uint32_t crc32c_streams(uint32_t crc, const void *memory, size_t nbytes);  /* without folding; for tests */
uint32_t crc32c_portable(uint32_t crc, const void *memory, size_t nbytes); /* with tables only; for tests */

#define SUM_NBYTES 4096 /* bytes per checksum of a file range */

uint32_t crc32c_page(const void *memory); /* of SUM_NBYTES bytes; never 0, which marks a page without a known checksum */

#endif
