/* See crc32c.h. The order: arithmetic, tables, the three loops, functions for callers.
 *
 * [Note: registers are polynomials] A register is a polynomial over GF(2) modulo P = x^32 + x^28 + x^27 + x^26 + x^25 + x^23 +
 * x^22 + x^20 + x^19 + x^18 + x^14 + x^13 + x^11 + x^10 + x^9 + x^8 + x^6 + 1. Bit 31 - i is the coefficient of x^i. To add a byte,
 * XOR it into the low bits, then multiply the register by x^8. This is linear: the register after A then B is the register
 * after A times x^(8 |B|), plus the register that B makes from zero. Callers get the inverted register and pass it back
 * inverted. So leading zeros change the CRC.
 *
 * [Note: three streams] The crc32 instruction takes 8 bytes. One can start every cycle, but the result, which the next one needs, takes
 * three cycles: one stream leaves two thirds of the unit idle. So the loop computes three neighbouring blocks at once, the later two from
 * zero, and then joins them by the rule above. The blocks have a fixed length, so the factor x^(8 |B|) is constant, and a multiplication by
 * this factor is four look-ups. With blocks of 1360 bytes the joins are cheap, and a page of 4096 bytes is one round and two words.
 * Out of cache, streams this close defeat the processor's own prefetcher and are no faster than one stream. So the loop prefetches.
 *
 * [Note: folding] With VPCLMULQDQ one instruction multiplies four pairs of 64-bit polynomials. Then the loop keeps 256 bytes instead of a
 * register: four vectors of four 128-bit lanes. To move a lane forward by d bytes, multiply the first half by x^(8 d + 64) and the second
 * half by x^(8 d), modulo P. The result has 96 bits and is added to the bytes at the new place. At the end all lanes become one, whose
 * 16 bytes go through the crc32 instruction. The lowest bit is the highest coefficient. So a product of halves is one bit too low: a factor x
 * too much. A register shifted by one has a factor x^31 too much. The constants therefore have exponents that are 32 smaller.
 * On Zen 5 folding reaches 68 GB/s and three streams 33 GB/s; out of cache, with a prefetch across pages, 42 and 32 GB/s.
 *
 * Source: Castagnoli, Brauer, Herrmann 1993 (P; RFC 3720, appendix B.4, has the test vectors); Kounavis and Berry 2005
 * (slicing by 8); Gopal et al. 2011 (three streams, Intel); Gopal et al. 2009 (folding, Intel). */
#include "crc32c.h"

#include <pthread.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define P 0x82F63B78u /* without the term x^32 */
#define BLOCK_NBYTES 1360
#define FOLD_NBYTES 256
#define AHEAD_NBYTES 8192 /* prefetch distance: two pages, as the processor's own prefetcher stops at the end of a page */
#define COPY_NBYTES ((size_t)(24 * BLOCK_NBYTES)) /* about 32 KiB */

static uint32_t slice[8][256]; /* slice[k][byte]: byte * x^(8 (k + 1)) */
static uint32_t skip[4][256];  /* skip[k][byte]: byte k of a register * x^(8 BLOCK_NBYTES) */
static uint64_t fold[4][2];    /* fold[k]: factors that move both halves of a lane forward by 16 (k + 1) bytes */
static uint64_t fold_all[2];   /* by FOLD_NBYTES */
static int has_instruction, has_folding;
static pthread_once_t built = PTHREAD_ONCE_INIT;

static uint32_t times_x(uint32_t reg)
{
    return reg >> 1 ^ (reg & 1 ? P : 0);
}

static uint32_t times_x8(uint32_t reg)
{
    return reg >> 8 ^ slice[0][reg & 255];
}

static uint32_t power_of_x8(int exponent)
{
    uint32_t power = 1u << 31; /* x^0 */
    while (exponent--)
        power = times_x8(power);
    return power;
}

/* See [Note: folding]. */
static void build_fold(uint64_t constants[2], int nbytes)
{
    constants[0] = (uint64_t)power_of_x8(nbytes + 4) << 1;
    constants[1] = (uint64_t)power_of_x8(nbytes - 4) << 1;
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

    uint32_t power = power_of_x8(BLOCK_NBYTES);
    for (int bit = 31; bit >= 0; bit--, power = times_x(power))
        skip[bit / 8][1 << bit % 8] = power;
    for (int k = 0; k < 4; k++)
        for (int byte = 1; byte < 256; byte++) /* the lowest bit, and the other bits: a smaller byte */
            skip[k][byte] = skip[k][byte & -byte] ^ skip[k][byte & (byte - 1)];
    for (int k = 0; k < 4; k++)
        build_fold(fold[k], 16 * (k + 1));
    build_fold(fold_all, FOLD_NBYTES);
#ifdef __x86_64__
    has_instruction = __builtin_cpu_supports("sse4.2") != 0;
    has_folding = has_instruction && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
#endif
}

/* Takes eight bytes a round: slice[k] is for the byte that k more bytes of the round follow. */
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
            __builtin_prefetch(p + 6 * BLOCK_NBYTES + 3 * (q - p)); /* two rounds ahead; no effect past the end */
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

#define FOLDING __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))

FOLDING static __m512i vector(const unsigned char *p)
{
    return _mm512_loadu_si512(p); /* p may be misaligned */
}

FOLDING static __m512i all_lanes(const uint64_t constants[2])
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)constants));
}

FOLDING static __m512i onto(__m512i lanes, __m512i constants, __m512i there)
{
    __m512i first = _mm512_clmulepi64_epi128(lanes, constants, 0x00), second = _mm512_clmulepi64_epi128(lanes, constants, 0x11);
    return _mm512_ternarylogic_epi64(first, second, there, 0x96); /* the sum of the three */
}

FOLDING static uint32_t by_folding(uint32_t reg, const unsigned char *p, size_t nbytes)
{
    if (nbytes < 2 * FOLD_NBYTES)
        return by_instruction(reg, p, nbytes);
    const __m512i far = all_lanes(fold_all), next = all_lanes(fold[3]);
    __m512i a = vector(p), b = vector(p + 64), c = vector(p + 128), d = vector(p + 192);
    a = _mm512_xor_si512(a, _mm512_inserti32x4(_mm512_setzero_si512(), _mm_cvtsi32_si128((int)reg), 0));
    for (p += FOLD_NBYTES, nbytes -= FOLD_NBYTES; nbytes >= FOLD_NBYTES; p += FOLD_NBYTES, nbytes -= FOLD_NBYTES) {
        for (int line = 0; line < FOLD_NBYTES; line += 64)
            __builtin_prefetch(p + AHEAD_NBYTES + line);
        a = onto(a, far, vector(p));
        b = onto(b, far, vector(p + 64));
        c = onto(c, far, vector(p + 128));
        d = onto(d, far, vector(p + 192));
    }
    d = onto(onto(onto(a, next, b), next, c), next, d);
    __m128i one = _mm512_extracti32x4_epi32(d, 3);
    const __m128i lanes[3] = {_mm512_castsi512_si128(d), _mm512_extracti32x4_epi32(d, 1), _mm512_extracti32x4_epi32(d, 2)};
    for (int lane = 0; lane < 3; lane++) {
        __m128i constants = _mm_loadu_si128((const void *)fold[2 - lane]);
        one = _mm_xor_si128(one, _mm_clmulepi64_si128(lanes[lane], constants, 0x00));
        one = _mm_xor_si128(one, _mm_clmulepi64_si128(lanes[lane], constants, 0x11));
    }
    uint64_t first = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(one));
    return by_instruction((uint32_t)_mm_crc32_u64(first, (uint64_t)_mm_extract_epi64(one, 1)), p, nbytes);
}

#else
#define by_instruction by_tables
#define by_folding by_tables
#endif

uint32_t crc32c(uint32_t crc, const void *memory, size_t nbytes)
{
    pthread_once(&built, build);
    return ~(has_folding ? by_folding : has_instruction ? by_instruction : by_tables)(~crc, memory, nbytes);
}

uint32_t crc32c_copy(uint32_t crc, void *to, const void *from, size_t nbytes)
{
    for (size_t done = 0, count; done < nbytes; done += count) { /* the CRC of each part is computed while the cache holds the part */
        count = nbytes - done < COPY_NBYTES ? nbytes - done : COPY_NBYTES;
        memcpy((char *)to + done, (const char *)from + done, count);
        crc = crc32c(crc, (char *)to + done, count);
    }
    return crc;
}

uint32_t crc32c_page(const void *memory)
{
    uint32_t crc = crc32c(0, memory, SUM_NBYTES);
    return crc ? crc : 1;
}

uint32_t crc32c_streams(uint32_t crc, const void *memory, size_t nbytes)
{
    pthread_once(&built, build);
    return ~(has_instruction ? by_instruction : by_tables)(~crc, memory, nbytes);
}

uint32_t crc32c_portable(uint32_t crc, const void *memory, size_t nbytes)
{
    pthread_once(&built, build);
    return ~by_tables(~crc, memory, nbytes);
}
