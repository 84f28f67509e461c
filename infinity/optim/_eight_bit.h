/* 8-bit moments as fp32, and back: [Note: 8-bit moments] in eight_bit.py, bit for bit.
 *
 * Included by _adam.c. The functions are inlined into one caller for each instruction set, and the compiler vectorises them there.
 */
#define CODED_BLOCK 128
#define LEAST_EXPONENT 17
#define MOMENTUM_TOP 14
#define VARIANCE_TOP 30

/* Blocks have a constant length, so that the compiler vectorises them; the last one is filled up with zeros. */
INLINE void decode_block(const uint8_t *restrict codes, uint32_t scale, float *restrict values, uint32_t top, uint32_t has_sign)
{
    const int32_t mask = has_sign ? 0x7F : 0xFF, base = (int32_t)((scale - top) << 23), nan = 0x7FC00000;
    int32_t wide[CODED_BLOCK];
    for (int i = 0; i < CODED_BLOCK; i++)
        wide[i] = codes[i];
    for (int i = 0; i < CODED_BLOCK; i++) {
        int32_t magnitude = wide[i] & mask, value = (magnitude << 20) + base;
        value = magnitude == 0 ? 0 : value;
        value = magnitude == mask ? nan : value;
        wide[i] = has_sign ? value | (int32_t)((uint32_t)(wide[i] & 0x80) << 24) : value;
    }
    memcpy(values, wide, sizeof wide);
}

/* draws: 16 random bits for each value. Returns the scale. */
INLINE uint32_t encode_block(const float *restrict values, const int32_t *restrict draws, uint8_t *restrict codes, uint32_t top,
                             uint32_t has_sign)
{
    int32_t largest = 0, bits[CODED_BLOCK], wide[CODED_BLOCK];
    memcpy(bits, values, sizeof bits);
    for (int i = 0; i < CODED_BLOCK; i++) {
        int32_t magnitude = bits[i] & 0x7FFFFFFF;
        magnitude = magnitude < 0x7F800000 ? magnitude : 0;
        largest = magnitude > largest ? magnitude : largest;
    }
    uint32_t exponent = (uint32_t)largest >> 23;
    exponent = exponent < top + LEAST_EXPONENT ? top + LEAST_EXPONENT : exponent;
    const int32_t least = (int32_t)((exponent - top) << 23);
    const float scale = float_of((270u << 23) - (uint32_t)least);
    const int32_t smallest = least + (1 << 20), nan = has_sign ? 0x7F : 0xFF;
    for (int i = 0; i < CODED_BLOCK; i++) {
        int32_t magnitude = bits[i] & 0x7FFFFFFF;
        int32_t rounded = (magnitude - least + (draws[i] << 4)) >> 20, few = magnitude > 0;
        if (has_sign) {     /* floats that are not negative have the order of their bits */
            int32_t draw = (int32_t)bits_of((float)draws[i] * 1.125f);
            few = draw < (int32_t)bits_of(float_of((uint32_t)magnitude) * scale);
        }
        int32_t is_small = -(magnitude < smallest), is_finite = -(magnitude < 0x7F800000);   /* masks: a branch here is not vectorised */
        int32_t code = (((few & is_small) | (rounded & ~is_small)) & is_finite) | (nan & ~is_finite);
        wide[i] = has_sign ? code | (int32_t)((uint32_t)bits[i] >> 24 & 0x80u) : code;
    }
    for (int i = 0; i < CODED_BLOCK; i++)
        codes[i] = (uint8_t)wide[i];
    return largest ? exponent : 0;
}

/* numel values from a block border on. */
INLINE void decode_moment(const uint8_t *codes, const uint8_t *scales, float *values, size_t numel, uint32_t top, uint32_t has_sign)
{
    size_t i = 0;
    for (; i + CODED_BLOCK <= numel; i += CODED_BLOCK)
        decode_block(codes + i, scales[i / CODED_BLOCK], values + i, top, has_sign);
    if (i < numel) {
        uint8_t last[CODED_BLOCK] = {0};
        memcpy(last, codes + i, numel - i);
        decode_block(last, scales[i / CODED_BLOCK], values + i, top, has_sign);    /* the buffer has room for a whole block */
    }
}

INLINE void encode_moment(float *values, const int32_t *draws, uint8_t *codes, uint8_t *scales, size_t numel, uint32_t top,
                          uint32_t has_sign)
{
    size_t i = 0;
    for (; i + CODED_BLOCK <= numel; i += CODED_BLOCK)
        scales[i / CODED_BLOCK] = (uint8_t)encode_block(values + i, draws + i, codes + i, top, has_sign);
    if (i < numel) {
        uint8_t last[CODED_BLOCK];
        memset(values + numel, 0, (CODED_BLOCK - (numel - i)) * sizeof *values);
        scales[i / CODED_BLOCK] = (uint8_t)encode_block(values + i, draws + i, last, top, has_sign);
        memcpy(codes + i, last, numel - i);
    }
}
