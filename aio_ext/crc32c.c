/* See crc32c.h. The order: arithmetic, tables, the two loops, what callers use.
 *
 * [Note: registers are polynomials] A register is a polynomial over GF(2) modulo P = x^32 + x^28 + x^27 + x^26 + x^25 + x^23 +
 * x^22 + x^20 + x^19 + x^18 + x^14 + x^13 + x^11 + x^10 + x^9 + x^8 + x^6 + 1, its bit 31 - i being the coefficient of x^i. A
 * byte is XORed into the low bits, then the register is multiplied by x^8. That is linear: the register after A then B is
 * the one after A times x^(8 |B|), plus what B makes of zero. The sum that callers see is the register inverted, so that
 * leading zeros count, and so is what they hand back.
 *
 * [Note: three streams] The crc32 instruction takes 8 bytes and starts every cycle, but its result, which the next one
 * needs, takes three: one stream leaves two thirds of the unit idle. So three neighbouring blocks go at once, the later two
 * from zero, and are then joined by the rule above. As the blocks' length is fixed, so is the factor x^(8 |B|), and
 * multiplying by it is four look-ups. 1360 bytes make the joins cheap and a page of 4096 one round with two words left.
 * Out of cache, streams this close defeat the processor's own prefetcher and go no faster than one; hence our prefetch.
 *
 * Source: Castagnoli, Brauer, Herrmann 1993 (P; RFC 3720, appendix B.4, has the test vectors); Kounavis and Berry 2005
 * (slicing by 8); Gopal et al. 2011 (three streams, Intel). */
#include "crc32c.h"

#include <pthread.h>
#include <string.h>
#ifdef __x86_64__
#include <nmmintrin.h>
#endif

#define P 0x82F63B78u /* less x^32 */
#define BLOCK_NBYTES 1360
#define COPY_NBYTES ((size_t)(24 * BLOCK_NBYTES)) /* 32 KiB, about */

static uint32_t slice[8][256]; /* slice[k][byte]: byte * x^(8 (k + 1)) */
static uint32_t skip[4][256];  /* skip[k][byte]: byte k of a register * x^(8 BLOCK_NBYTES) */
static int has_instruction;
static pthread_once_t built = PTHREAD_ONCE_INIT;

static uint32_t times_x(uint32_t reg)
{
    return reg >> 1 ^ (reg & 1 ? P : 0);
}

static uint32_t times_x8(uint32_t reg)
{
    return reg >> 8 ^ slice[0][reg & 255];
}

static void build(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        slice[0][byte] = byte;
        for (int bit = 0; bit < 8; bit++)
            slice[0][byte] = times_x(slice[0][byte]);
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++)
            slice[k][byte] = times_x8(slice[k - 1][byte]);

    uint32_t power = 1u << 31; /* x^0 */
    for (int i = 0; i < BLOCK_NBYTES; i++)
        power = times_x8(power);
    for (int bit = 31; bit >= 0; bit--, power = times_x(power))
        skip[bit / 8][1 << bit % 8] = power;
    for (int k = 0; k < 4; k++)
        for (int byte = 1; byte < 256; byte++) /* the lowest bit and the others, which are a smaller byte */
            skip[k][byte] = skip[k][byte & -byte] ^ skip[k][byte & (byte - 1)];
#ifdef __x86_64__
    has_instruction = __builtin_cpu_supports("sse4.2") != 0;
#endif
}

/* Eight bytes at a time: each goes through the table that multiplies by what follows it. */
static uint32_t by_tables(uint32_t reg, const unsigned char *p, size_t nbytes)
{
    for (; nbytes >= 8; p += 8, nbytes -= 8) {
        reg ^= p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        reg = slice[7][reg & 255] ^ slice[6][reg >> 8 & 255] ^ slice[5][reg >> 16 & 255] ^ slice[4][reg >> 24] ^
              slice[3][p[4]] ^ slice[2][p[5]] ^ slice[1][p[6]] ^ slice[0][p[7]];
    }
    for (; nbytes; p++, nbytes--)
        reg = times_x8(reg ^ *p);
    return reg;
}

#ifdef __x86_64__

static uint64_t word(const unsigned char *p)
{
    uint64_t value;
    memcpy(&value, p, sizeof value); /* p may be misaligned */
    return value;
}

static uint32_t past_block(uint32_t reg)
{
    return skip[0][reg & 255] ^ skip[1][reg >> 8 & 255] ^ skip[2][reg >> 16 & 255] ^ skip[3][reg >> 24];
}

__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t reg, const unsigned char *p, size_t nbytes)
{
    for (; nbytes >= 3 * BLOCK_NBYTES; p += 3 * BLOCK_NBYTES, nbytes -= 3 * BLOCK_NBYTES) {
        uint64_t first = reg, second = 0, third = 0;
        for (const unsigned char *q = p; q < p + BLOCK_NBYTES; q += 8) {
            __builtin_prefetch(p + 6 * BLOCK_NBYTES + 3 * (q - p)); /* two rounds on; past the end it does nothing */
            first = _mm_crc32_u64(first, word(q));
            second = _mm_crc32_u64(second, word(q + BLOCK_NBYTES));
            third = _mm_crc32_u64(third, word(q + 2 * BLOCK_NBYTES));
        }
        reg = past_block(past_block((uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
    }
    for (; nbytes >= 8; p += 8, nbytes -= 8)
        reg = (uint32_t)_mm_crc32_u64(reg, word(p));
    for (; nbytes; p++, nbytes--)
        reg = _mm_crc32_u8(reg, *p);
    return reg;
}

#else
#define by_instruction by_tables
#endif

uint32_t crc32c(uint32_t crc, const void *memory, size_t nbytes)
{
    pthread_once(&built, build);
    return ~(has_instruction ? by_instruction : by_tables)(~crc, memory, nbytes);
}

uint32_t crc32c_copy(uint32_t crc, void *to, const void *from, size_t nbytes)
{
    for (size_t done = 0, count; done < nbytes; done += count) { /* each part is summed while it is in the cache */
        count = nbytes - done < COPY_NBYTES ? nbytes - done : COPY_NBYTES;
        memcpy((char *)to + done, (const char *)from + done, count);
        crc = crc32c(crc, (char *)to + done, count);
    }
    return crc;
}

uint32_t crc32c_portable(uint32_t crc, const void *memory, size_t nbytes)
{
    pthread_once(&built, build);
    return ~by_tables(~crc, memory, nbytes);
}
