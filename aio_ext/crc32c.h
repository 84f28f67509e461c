/* CRC-32C (Castagnoli) of bytes in memory. Knows no Python, no files. Any thread may call it, many at once.
 *
 * crc continues an earlier sum and is 0 at the start: crc32c(crc32c(0, a), b) is that of a followed by b. */
#ifndef AIO_EXT_CRC32C_H
#define AIO_EXT_CRC32C_H

#include <stddef.h>
#include <stdint.h>

uint32_t crc32c(uint32_t crc, const void *memory, size_t nbytes);          /* by the processor's instructions, if it has any */
uint32_t crc32c_copy(uint32_t crc, void *to, const void *from, size_t nbytes); /* the same, of bytes that it copies */
uint32_t crc32c_streams(uint32_t crc, const void *memory, size_t nbytes);  /* the same without folding; for tests */
uint32_t crc32c_portable(uint32_t crc, const void *memory, size_t nbytes); /* the same by tables; for tests */

#define SUM_NBYTES 4096 /* that one sum of a range in a file is of */

uint32_t crc32c_page(const void *memory); /* of SUM_NBYTES; never 0, which stands for bytes that nobody knows */

#endif
