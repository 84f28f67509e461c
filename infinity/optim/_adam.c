/* _adam: the arithmetic of one optimizer step on host memory.
 *
 * Knows addresses, lengths and IEEE 754. Knows no tensor, tier, rank or file: adam.py checks the arguments.
 * Addresses are ints; the caller keeps the memory alive. A function drops the GIL while it works. Any number of Python
 * threads may call; one call at a time has the pool. `threads` includes the caller; 0 means all CPUs of the caller.
 * This long file stays whole because its parts share the pool and the rounding mode.
 *
 *   isas() -> tuple[str, ...]
 *       The members of ("scalar", "avx2", "avx512") that this CPU has, widest last.
 *   adam(weight, residual, momentum, variance, momentum_scale, variance_scale, grad, numel, grad_is_fp32, scalars, decoupled, dither,
 *        threads, isa, stores)
 *       Updates one shard in place, one pass: 12 bytes a parameter read, 12 written (8 and 8 with dither, 6 and 6 with scales), and
 *       the gradient. The scales are 0, or uint8[numel / 128] of 8-bit moments: [Note: 8-bit moments] in eight_bit.py. With scales,
 *       and with residual 0, the weight is bf16[numel] and rounded stochastically.
 *       stores: 1 (weights), 2 (moments) or 3 (both). With 2, weight and residual are 0. With 1 or 2, the update is decoupled.
 *       After a call with 1 and a call with 2, all bits are those of one call with 3.
 *       weight is bf16[numel] and residual int16[numel], or weight fp32[numel] and residual 0; the moments are fp32[numel].
 *       scalars: (grad_scale, decay_or_l2, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps,
 *       step_size), each rounded to fp32 here, once. isa: one of isas(), or None for the widest.
 *       dither: None, or (key0, key1, index) of uint32, for a split master or scales: without scales the moments are bf16[numel],
 *       see [Note: bf16 moments].
 *   split(master, weight, residual, numel, threads);  join(weight, residual, master, numel, threads)
 *   accumulate(dst, src, numel, src_is_fp32, first, threads)
 *       dst fp32[numel] = src if first, else += src.
 *   sum_squares(grad, numel, grad_is_fp32, limbs, threads)
 *       Adds the squares of grad, which begins on a block border, to limbs, int64[72].
 *
 * [Note: the fixed arithmetic]
 * Each operation is fp32, rounded to nearest even. Denormals are kept, and nothing is contracted. Square root and division
 * are correctly rounded. Source: Loshchilov & Hutter 2019, Algorithm 2, with the bias corrections in two scalars:
 *
 *     p = join(weight, residual);  g = float(grad) * grad_scale
 *     coupled:  g = g + l2 * p     decoupled:  p = p * decay
 *     m = m * beta1 + g * one_minus_beta1
 *     v = v * beta2 + (g * g) * one_minus_beta2
 *     d = sqrt(v) * inv_sqrt_bias2 + eps
 *     p = p - step_size * (m / d)
 *     weight, residual = split(p)
 *
 * ADAM below is the only C code of these formulas, for every width. A build needs -ffp-contract=off, because gcc would use
 * the fused operations of AVX-512. IEEE leaves one thing open: which NaN an operation returns. A compiler may swap operands.
 * Every NaN that an update leaves behind is therefore stored as 0x7FC00000. A NaN in m or v makes p a NaN, so a test of p
 * is sufficient.
 *
 * [Note: denormals at full speed]
 * On an x86 processor, a vector of products takes some hundred cycles more if one product is a denormal or came from one.
 * An update took 6 to 13 times as long with gradients of about 1e-20, whose squares are denormals. The same happens
 * permanently to a momentum without gradients, as in the row of an embedding that no batch uses any more: rounding keeps
 * 0.9 * x at 4 units of 2^-149. AdamW therefore runs with denormals flushed to zero, in operands and in results, and checks
 * the results. A flushed value is at most 2^-126, and no scalar increases it: grad_scale is at most 1. This is less than
 * half a unit of a sum of 2^-100 or more, which is therefore right. For smaller results:
 *   - m and v are right if the gradient is zero and they were zero or at least 2^-125; v is also right if no product was
 *     small and v was not negative, because nothing cancels then;
 *   - if the gradient is zero and they were less, their bits are integers in units of 2^-149, before and after: `decayed`
 *     rounds them once, from float64. A result of zero is right, with its sign. A quotient of such an m is too small to
 *     change a p of 2^-58, and the root of such a v is too small to change eps: `plan_flushes` tests the scalars for this;
 *   - p is right if it was zero and m is zero.
 * A vector with any other lane is computed again with denormals kept. The whole computation in float64, rounded after each
 * operation, took as long as the processor's own handling.
 *
 * [Note: weight and residual]
 * weight = (bits + 0x8000) >> 16, residual = bits - (weight << 16). The residual fits an int16 and is the low half of bits.
 * bits = (weight << 16) + residual mod 2^32 restores the master. The plain formula would turn the NaN 0x7FFFFFFF into
 * -0.0, so split makes a NaN's weight the quiet NaN of its sign and the residual 0.
 *
 * [Note: bf16 moments]
 * bf16 moments are widened, updated and used in fp32, and stored with stochastic rounding: 16 random bits are added to the fp32
 * bits and the lower half is cut off. Rounding to nearest would lose every change below 1/256 of a value: at beta2 = 0.999 a
 * variance could not shrink. The random bits are a hash of two keys and the element's index in its parameter, index + i below:
 *
 *     x = (index + i + key0) * 0x85EBCA6B;  x ^= x >> 15;  x = (x ^ key1) * 0xC2B2AE35;  x ^= x >> 16
 *
 * (multipliers of MurmurHash3's finalizer, A. Appleby 2011). The momentum gets the low half, the variance the high half. The
 * lower half of an infinity and of the stored NaN is zero, so both keep their values.
 *
 * [Note: sums without an order]
 * A gradient is cut into blocks of 1,024 elements, the last one padded with zeros. A block's sum is float64, in a fixed
 * order. Lane j of 32 adds the squares of elements i with i % 32 == j, in order. Then the lanes are halved: lane j
 * takes lane j + 16, then j + 8, 4, 2, 1. (A square of an fp32 is exact in float64.) The sum is added to a
 * fixed-point number. Limb k counts units of 2^(32 k - 1126). Each addition brings a limb less than 2^32, so 2^31 additions
 * fit, and limbs of several threads or ranks are added as integers. Limb 70 counts the blocks with an infinite sum, limb
 * 71 the blocks with a NaN. Every split, order, thread count and rank count therefore gives the same bits.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 1024          /* of the norm */
#define LANES 32            /* of a block */
#define NUM_LIMBS 72
#define TILE (32 * BLOCK)   /* elements that a thread takes at a time; a smaller call does not wake the pool */
#define MAX_THREADS 256

/* ---- the thread's rounding ---- */

#define IEEE 0x1F80u        /* to nearest, denormals kept */
#define FLUSHING 0x9FC0u    /* to nearest, denormals flushed */

/* Returns the thread's previous mode. The compiler moves no operation on memory across the change. */
static __attribute__((noinline)) unsigned set_mode(unsigned mode)
{
#if defined(__x86_64__)
    unsigned saved = _mm_getcsr();
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(mode);
    __asm__ volatile("" ::: "memory");
    return saved;
#else
    return mode;
#endif
}

/* ---- one element ---- */

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE float bf16(uint16_t x) { return float_of((uint32_t)x << 16); }
INLINE int is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

INLINE float scalar_set(float x) { return x; }

INLINE float scalar_sqrt(float x)
{
#if defined(__x86_64__)
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));   /* sqrtf would call libm for errno */
#else
    return __builtin_sqrtf(x);
#endif
}

INLINE void scalar_load(const float *x, float *v) { *v = *x; }
INLINE void scalar_store(float *x, const float *v) { *x = *v; }
INLINE void scalar_widen(const uint16_t *x, float *v) { *v = bf16(*x); }
INLINE int scalar_any_nan(const float *v) { return is_nan(bits_of(*v)); }
INLINE float scalar_one_nan(float x) { return is_nan(bits_of(x)) ? float_of(0x7FC00000u) : x; }

INLINE void scalar_join(const uint16_t *weight, const int16_t *residual, float *v)
{
    *v = float_of(((uint32_t)*weight << 16) + (uint32_t)(int32_t)*residual);
}

#include "_eight_bit.h"

/* The random bits of one element: [Note: bf16 moments]. */
INLINE uint32_t scalar_mix(uint32_t x, uint32_t key0, uint32_t key1)
{
    x = (x + key0) * 0x85EBCA6Bu;
    x = (x ^ x >> 15 ^ key1) * 0xC2B2AE35u;
    return x ^ x >> 16;
}

INLINE void scalar_store_dithered(uint16_t *m16, uint16_t *v16, const float *m, const float *v, uint32_t index, uint32_t key0,
                                  uint32_t key1)
{
    uint32_t random = scalar_mix(index, key0, key1);
    *m16 = (uint16_t)((bits_of(*m) + (random & 0xFFFF)) >> 16);
    *v16 = (uint16_t)((bits_of(*v) + (random >> 16)) >> 16);
}

INLINE void scalar_split(const float *v, uint16_t *weight, int16_t *residual)
{
    *weight = (uint16_t)((bits_of(*v) + 0x8000u) >> 16);
    *residual = (int16_t)(uint16_t)bits_of(*v);
}

#define WEIGHTS 1           /* of Update.stores */
#define MOMENTS 2

typedef struct {
    void *weight;
    int16_t *residual;          /* NULL: weight is fp32, or bf16 beside 8-bit moments */
    void *momentum, *variance;  /* fp32; bf16 if dithered; 8-bit codes if they have scales */
    uint8_t *momentum_scale, *variance_scale;   /* NULL, or one for each block of codes */
    const void *grad;
    int grad_is_fp32, decoupled, dithered;
    int stores;                 /* WEIGHTS, MOMENTS or both */
    uint32_t key0, key1, index;
    float grad_scale, decay_or_l2, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, step_size;
    int flushes;        /* flush denormals if no result changes: [Note: denormals at full speed] */
    uint32_t least_g;   /* bits: from this scaled gradient on, its square and the term of v are normal */
} Update;

/* bf16 moments go with a split master, also in a call without weights. */
INLINE int is_split(const Update *u) { return u->residual != NULL || !(u->stores & WEIGHTS); }

/* A single element is updated with denormals kept. */
INLINE int scalar_any_small(const float *m, const float *v, const float *p) { (void)m, (void)v, (void)p; return 0; }
INLINE int scalar_mend(const Update *u, const float *g0, const float *m0, const float *v0, const float *p0, const float *g,
                       float *m, float *v, const float *p)
{
    (void)u, (void)g0, (void)m0, (void)v0, (void)p0, (void)g, (void)m, (void)v, (void)p;
    return 1;
}

/* The bits of magnitudes in [Note: denormals at full speed]. */
#define SMALL 0x0D800000u   /* 2^-100: flushed values do not change a sum of at least this size */
#define FEW 0x01000000u     /* 2^-125, which are as many units of 2^-149 */
#define DEAF 0x22800000u    /* 2^-58: a few such units of m do not change a p of at least this size */

/* ---- two vectors of eight or sixteen ---- */

/* A 16-bit vector is as long as two vectors of floats, so these come in pairs (one at a time: 18 % slower in cache, 7 % out
 * of cache). An unpack interleaves within 128-bit lanes. The 64-bit words are therefore reordered before an unpack so that
 * the results are contiguous, and reordered back after a split. Interleaving makes (weight << 16) | residual; the borrow of
 * a negative residual is subtracted from the weight in the 16-bit words. */
#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

AVX2 INLINE __m256 avx2_set(float x) { return _mm256_set1_ps(x); }
AVX2 INLINE __m256 avx2_sqrt(__m256 x) { return _mm256_sqrt_ps(x); }
AVX2 INLINE void avx2_load(const float *x, __m256 *v) { v[0] = _mm256_loadu_ps(x); v[1] = _mm256_loadu_ps(x + 8); }
AVX2 INLINE void avx2_store(float *x, const __m256 *v) { _mm256_storeu_ps(x, v[0]); _mm256_storeu_ps(x + 8, v[1]); }

AVX2 INLINE void avx2_interleave(__m256i low, __m256i high, __m256 *v)
{
    low = _mm256_permute4x64_epi64(low, 0xD8);
    high = _mm256_permute4x64_epi64(high, 0xD8);
    v[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low, high));
    v[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low, high));
}

AVX2 INLINE void avx2_widen(const uint16_t *x, __m256 *v)
{
    avx2_interleave(_mm256_setzero_si256(), _mm256_loadu_si256((const __m256i *)x), v);
}

AVX2 INLINE void avx2_join(const uint16_t *weight, const int16_t *residual, __m256 *v)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)residual);
    __m256i high = _mm256_loadu_si256((const __m256i *)weight);
    avx2_interleave(low, _mm256_add_epi16(high, _mm256_srai_epi16(low, 15)), v);
}

AVX2 INLINE void avx2_split(const __m256 *v, uint16_t *weight, int16_t *residual)
{
    const __m256i sort = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));   /* low halves, then high halves */
    __m256i a = _mm256_shuffle_epi8(_mm256_castps_si256(v[0]), sort);
    __m256i b = _mm256_shuffle_epi8(_mm256_castps_si256(v[1]), sort);
    __m256i low = _mm256_permute4x64_epi64(_mm256_unpacklo_epi64(a, b), 0xD8);
    __m256i high = _mm256_permute4x64_epi64(_mm256_unpackhi_epi64(a, b), 0xD8);
    _mm256_storeu_si256((__m256i *)residual, low);
    _mm256_storeu_si256((__m256i *)weight, _mm256_sub_epi16(high, _mm256_srai_epi16(low, 15)));
}

AVX2 INLINE __m256i avx2_mix(uint32_t index, uint32_t key0, uint32_t key1)
{
    __m256i x = _mm256_add_epi32(_mm256_set1_epi32((int)(index + key0)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32((int)0x85EBCA6Bu));
    x = _mm256_xor_si256(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), _mm256_set1_epi32((int)key1));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32((int)0xC2B2AE35u));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}

AVX2 INLINE __m256i avx2_dither(__m256 value, __m256i random)
{
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(value), random), 16);
}

AVX2 INLINE void avx2_store_dithered(uint16_t *m16, uint16_t *v16, const __m256 *m, const __m256 *v, uint32_t index,
                                     uint32_t key0, uint32_t key1)
{
    const __m256i low = _mm256_set1_epi32(0xFFFF);
    __m256i r0 = avx2_mix(index, key0, key1), r1 = avx2_mix(index + 8, key0, key1);
    __m256i first = _mm256_packus_epi32(avx2_dither(m[0], _mm256_and_si256(r0, low)),
                                        avx2_dither(m[1], _mm256_and_si256(r1, low)));
    __m256i second = _mm256_packus_epi32(avx2_dither(v[0], _mm256_srli_epi32(r0, 16)),
                                         avx2_dither(v[1], _mm256_srli_epi32(r1, 16)));
    _mm256_storeu_si256((__m256i *)m16, _mm256_permute4x64_epi64(first, 0xD8));
    _mm256_storeu_si256((__m256i *)v16, _mm256_permute4x64_epi64(second, 0xD8));
}

AVX2 INLINE int avx2_any_nan(const __m256 *v) { return _mm256_movemask_ps(_mm256_cmp_ps(v[0], v[1], _CMP_UNORD_Q)); }

AVX2 INLINE __m256 avx2_one_nan(__m256 x)
{
    __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

AVX2 INLINE __m256i avx2_magnitude(__m256 x)
{
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
}

AVX2 INLINE __m256i avx2_below(__m256i magnitude, uint32_t bound)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)bound), magnitude);
}

AVX2 INLINE __m256i avx2_is_zero(__m256i x) { return _mm256_cmpeq_epi32(x, _mm256_setzero_si256()); }

AVX2 INLINE int avx2_any_small(const __m256 *m, const __m256 *v, const __m256 *p)
{
    __m256i a = _mm256_min_epi32(avx2_magnitude(m[0]), avx2_magnitude(m[1]));
    __m256i b = _mm256_min_epi32(avx2_magnitude(v[0]), avx2_magnitude(v[1]));
    __m256i c = _mm256_min_epi32(avx2_magnitude(p[0]), avx2_magnitude(p[1]));
    return _mm256_movemask_epi8(avx2_below(_mm256_min_epi32(_mm256_min_epi32(a, b), c), SMALL));
}

/* beta * x for x below FEW with a gradient of zero (`alone` is set) and x not zero. Other lanes keep their values. */
AVX2 INLINE __m256 avx2_decayed(__m256 sum, __m256i alone, __m256 x, float beta)
{
    __m256i units = avx2_magnitude(x);
    __m128i low = _mm256_cvtpd_epi32(_mm256_mul_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(units)), _mm256_set1_pd(beta)));
    __m128i high = _mm256_cvtpd_epi32(_mm256_mul_pd(_mm256_cvtepi32_pd(_mm256_extracti128_si256(units, 1)), _mm256_set1_pd(beta)));
    units = _mm256_set_m128i(high, low);
    __m256 decayed = _mm256_or_ps(_mm256_castsi256_ps(units), _mm256_and_ps(x, _mm256_set1_ps(-0.0f)));
    return _mm256_blendv_ps(sum, decayed, _mm256_castsi256_ps(_mm256_andnot_si256(avx2_is_zero(units), alone)));
}

/* Corrects m and v after flushing. Returns whether a lane may still be wrong. g0, m0, v0, p0: as stored. */
AVX2 INLINE int avx2_mend(const Update *u, const __m256 *g0, const __m256 *m0, const __m256 *v0, const __m256 *p0,
                          const __m256 *g, __m256 *m, __m256 *v, const __m256 *p)
{
    __m256 any = _mm256_or_ps(_mm256_or_ps(_mm256_or_ps(g0[0], g0[1]), _mm256_or_ps(m0[0], m0[1])), _mm256_or_ps(v0[0], v0[1]));
    __m256i doubt = avx2_below(_mm256_min_epi32(avx2_magnitude(p[0]), avx2_magnitude(p[1])), SMALL);
    if (_mm256_testz_si256(avx2_magnitude(any), avx2_magnitude(any)) & _mm256_testz_si256(doubt, doubt))
        return 0;   /* never trained: the most frequent case by far */
    doubt = _mm256_setzero_si256();
    for (int k = 0; k < 2; k++) {
        __m256i still = avx2_is_zero(avx2_magnitude(g0[k])), was_m = avx2_magnitude(m0[k]), was_v = avx2_magnitude(v0[k]);
        __m256i few_m = _mm256_andnot_si256(avx2_is_zero(was_m), avx2_below(was_m, FEW));
        __m256i few_v = _mm256_andnot_si256(avx2_is_zero(was_v), avx2_below(was_v, FEW));
        __m256i faint = _mm256_or_si256(avx2_below(avx2_magnitude(g[k]), u->least_g), few_v);
        __m256i small_v = _mm256_and_si256(avx2_below(avx2_magnitude(v[k]), SMALL), faint);
        __m256i moved = _mm256_or_si256(avx2_below(avx2_magnitude(m[k]), SMALL), small_v);
        doubt = _mm256_or_si256(doubt, _mm256_andnot_si256(still, moved));
        doubt = _mm256_or_si256(doubt, _mm256_srai_epi32(_mm256_castps_si256(v0[k]), 31));
        __m256i alone_m = _mm256_and_si256(still, few_m), alone_v = _mm256_and_si256(still, few_v), is = avx2_magnitude(p[k]);
        m[k] = avx2_decayed(m[k], alone_m, m0[k], u->beta1);
        v[k] = avx2_decayed(v[k], alone_v, v0[k], u->beta2);
        __m256i none = avx2_is_zero(_mm256_or_si256(avx2_magnitude(p0[k]), avx2_magnitude(m[k])));
        doubt = _mm256_or_si256(doubt, _mm256_andnot_si256(none, avx2_below(is, SMALL)));
        doubt = _mm256_or_si256(doubt, _mm256_and_si256(alone_m, avx2_below(is, DEAF)));
    }
    return _mm256_movemask_epi8(doubt);
}

AVX512 INLINE __m512 avx512_set(float x) { return _mm512_set1_ps(x); }
AVX512 INLINE __m512 avx512_sqrt(__m512 x) { return _mm512_sqrt_ps(x); }
AVX512 INLINE void avx512_load(const float *x, __m512 *v) { v[0] = _mm512_loadu_ps(x); v[1] = _mm512_loadu_ps(x + 16); }
AVX512 INLINE void avx512_store(float *x, const __m512 *v) { _mm512_storeu_ps(x, v[0]); _mm512_storeu_ps(x + 16, v[1]); }

AVX512 INLINE void avx512_interleave(__m512i low, __m512i high, __m512 *v)
{
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    low = _mm512_permutexvar_epi64(order, low);
    high = _mm512_permutexvar_epi64(order, high);
    v[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low, high));
    v[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low, high));
}

AVX512 INLINE void avx512_widen(const uint16_t *x, __m512 *v)
{
    avx512_interleave(_mm512_setzero_si512(), _mm512_loadu_si512(x), v);
}

AVX512 INLINE void avx512_join(const uint16_t *weight, const int16_t *residual, __m512 *v)
{
    __m512i low = _mm512_loadu_si512(residual);
    __m512i high = _mm512_loadu_si512(weight);
    avx512_interleave(low, _mm512_add_epi16(high, _mm512_srai_epi16(low, 15)), v);
}

AVX512 INLINE void avx512_split(const __m512 *v, uint16_t *weight, int16_t *residual)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i sort = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));   /* low halves, then high halves */
    __m512i a = _mm512_shuffle_epi8(_mm512_castps_si512(v[0]), sort);
    __m512i b = _mm512_shuffle_epi8(_mm512_castps_si512(v[1]), sort);
    __m512i low = _mm512_permutexvar_epi64(order, _mm512_unpacklo_epi64(a, b));
    __m512i high = _mm512_permutexvar_epi64(order, _mm512_unpackhi_epi64(a, b));
    _mm512_storeu_si512(residual, low);
    _mm512_storeu_si512(weight, _mm512_sub_epi16(high, _mm512_srai_epi16(low, 15)));
}

AVX512 INLINE __m512i avx512_mix(uint32_t index, uint32_t key0, uint32_t key1)
{
    __m512i x = _mm512_add_epi32(_mm512_set1_epi32((int)(index + key0)),
                                 _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32((int)0x85EBCA6Bu));
    x = _mm512_xor_si512(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)), _mm512_set1_epi32((int)key1));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32((int)0xC2B2AE35u));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

AVX512 INLINE __m256i avx512_dither(__m512 value, __m512i random)
{
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(value), random), 16));
}

AVX512 INLINE void avx512_store_dithered(uint16_t *m16, uint16_t *v16, const __m512 *m, const __m512 *v, uint32_t index,
                                         uint32_t key0, uint32_t key1)
{
    const __m512i low = _mm512_set1_epi32(0xFFFF);
    for (int k = 0; k < 2; k++) {
        __m512i random = avx512_mix(index + 16 * k, key0, key1);
        _mm256_storeu_si256((__m256i *)m16 + k, avx512_dither(m[k], _mm512_and_si512(random, low)));
        _mm256_storeu_si256((__m256i *)v16 + k, avx512_dither(v[k], _mm512_srli_epi32(random, 16)));
    }
}

AVX512 INLINE int avx512_any_nan(const __m512 *v) { return _mm512_cmp_ps_mask(v[0], v[1], _CMP_UNORD_Q); }

AVX512 INLINE __m512 avx512_one_nan(__m512 x)
{
    __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
}

AVX512 INLINE __m512i avx512_magnitude(__m512 x)
{
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
}

AVX512 INLINE __mmask16 avx512_below(__m512i magnitude, uint32_t bound)
{
    return _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32((int)bound));
}

AVX512 INLINE __mmask16 avx512_is_zero(__m512i x) { return _mm512_testn_epi32_mask(x, x); }

AVX512 INLINE int avx512_any_small(const __m512 *m, const __m512 *v, const __m512 *p)
{
    __m512i a = _mm512_min_epi32(avx512_magnitude(m[0]), avx512_magnitude(m[1]));
    __m512i b = _mm512_min_epi32(avx512_magnitude(v[0]), avx512_magnitude(v[1]));
    __m512i c = _mm512_min_epi32(avx512_magnitude(p[0]), avx512_magnitude(p[1]));
    return avx512_below(_mm512_min_epi32(_mm512_min_epi32(a, b), c), SMALL);
}

AVX512 INLINE __m512 avx512_decayed(__m512 sum, __mmask16 alone, __m512 x, float beta)
{
    __m512i units = avx512_magnitude(x);
    __m256i low = _mm512_cvtpd_epi32(_mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(units)), _mm512_set1_pd(beta)));
    __m256i high = _mm512_cvtpd_epi32(_mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(units, 1)), _mm512_set1_pd(beta)));
    units = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80000000u));
    return _mm512_mask_mov_ps(sum, alone & ~avx512_is_zero(units), _mm512_castsi512_ps(_mm512_or_si512(units, sign)));
}

AVX512 INLINE int avx512_mend(const Update *u, const __m512 *g0, const __m512 *m0, const __m512 *v0, const __m512 *p0,
                              const __m512 *g, __m512 *m, __m512 *v, const __m512 *p)
{
    __m512i any = _mm512_or_si512(avx512_magnitude(g0[0]), avx512_magnitude(g0[1]));
    any = _mm512_or_si512(any, _mm512_or_si512(avx512_magnitude(m0[0]), avx512_magnitude(m0[1])));
    any = _mm512_or_si512(any, _mm512_or_si512(avx512_magnitude(v0[0]), avx512_magnitude(v0[1])));
    int doubt = avx512_below(_mm512_min_epi32(avx512_magnitude(p[0]), avx512_magnitude(p[1])), SMALL);
    if (!(_mm512_test_epi32_mask(any, any) | doubt))
        return 0;   /* never trained: the most frequent case by far */
    doubt = 0;
    for (int k = 0; k < 2; k++) {
        __m512i was_m = avx512_magnitude(m0[k]), was_v = avx512_magnitude(v0[k]), is = avx512_magnitude(p[k]);
        __mmask16 still = avx512_is_zero(avx512_magnitude(g0[k]));
        __mmask16 few_m = avx512_below(was_m, FEW) & ~avx512_is_zero(was_m);
        __mmask16 few_v = avx512_below(was_v, FEW) & ~avx512_is_zero(was_v);
        __mmask16 faint = avx512_below(avx512_magnitude(g[k]), u->least_g) | few_v;
        doubt |= ~still & (avx512_below(avx512_magnitude(m[k]), SMALL) | (avx512_below(avx512_magnitude(v[k]), SMALL) & faint));
        doubt |= _mm512_cmplt_epi32_mask(_mm512_castps_si512(v0[k]), _mm512_setzero_si512());
        m[k] = avx512_decayed(m[k], still & few_m, m0[k], u->beta1);
        v[k] = avx512_decayed(v[k], still & few_v, v0[k], u->beta2);
        __mmask16 none = avx512_is_zero(_mm512_or_si512(avx512_magnitude(p0[k]), avx512_magnitude(m[k])));
        doubt |= (avx512_below(is, SMALL) & ~none) | (avx512_below(is, DEAF) & still & few_m);
    }
    return doubt;
}
#endif

/* ---- adam ---- */

/* UNIT elements are unrolled, and the lines of AHEAD elements later are prefetched: 6-9 % faster on Zen 3, equal for 256 to
 * 1,024. A unit of 128, which gcc does not unroll, is 10 % slower. A prefetch past the end is allowed. */
#define UNIT 64
#define AHEAD 512

INLINE void prefetch(const void *array, size_t itemsize, size_t i)
{
    for (size_t k = 0; k < UNIT * itemsize; k += 64)
        __builtin_prefetch((const char *)array + (i + AHEAD) * itemsize + k, 1);
}

/* Defines <isa>_adam(update, begin, end): [Note: the fixed arithmetic] on COUNT vectors V of WIDTH floats at a time. The
 * operators + - * / of V are lanewise. All flags except `flushes` are constants in an inlined step. A step returns 0 if it
 * has stored nothing because denormals must be kept. */
#define ADAM(isa, TARGET, V, WIDTH, COUNT)                                                                             \
    TARGET INLINE int isa##_step(const Update *u, size_t i, int is_split, int fp32, int decoupled, int dithered,       \
                                 int flushes)                                                                          \
    {                                                                                                                  \
        V p[COUNT], g[COUNT], m[COUNT], v[COUNT], p0[COUNT], g0[COUNT], m0[COUNT], v0[COUNT];                          \
        if (!(u->stores & WEIGHTS))                                                                                    \
            for (int k = 0; k < COUNT; k++)                                                                            \
                p[k] = isa##_set(0);                                                                                   \
        else if (is_split)                                                                                             \
            isa##_join((uint16_t *)u->weight + i, u->residual + i, p);                                                 \
        else                                                                                                           \
            isa##_load((float *)u->weight + i, p);                                                                     \
        if (fp32)                                                                                                      \
            isa##_load((const float *)u->grad + i, g);                                                                 \
        else                                                                                                           \
            isa##_widen((const uint16_t *)u->grad + i, g);                                                             \
        if (dithered) {                                                                                                \
            isa##_widen((const uint16_t *)u->momentum + i, m);                                                         \
            isa##_widen((const uint16_t *)u->variance + i, v);                                                         \
        } else {                                                                                                       \
            isa##_load((const float *)u->momentum + i, m);                                                             \
            isa##_load((const float *)u->variance + i, v);                                                             \
        }                                                                                                              \
        for (int k = 0; k < COUNT; k++) {                                                                              \
            p0[k] = p[k], g0[k] = g[k], m0[k] = m[k], v0[k] = v[k];                                                    \
            g[k] = g[k] * isa##_set(u->grad_scale);                                                                    \
            if (decoupled)                                                                                             \
                p[k] = p[k] * isa##_set(u->decay_or_l2);                                                               \
            else                                                                                                       \
                g[k] = g[k] + isa##_set(u->decay_or_l2) * p[k];                                                        \
            m[k] = m[k] * isa##_set(u->beta1) + g[k] * isa##_set(u->one_minus_beta1);                                  \
            v[k] = v[k] * isa##_set(u->beta2) + (g[k] * g[k]) * isa##_set(u->one_minus_beta2);                         \
            V d = isa##_sqrt(v[k]) * isa##_set(u->inv_sqrt_bias2) + isa##_set(u->eps);                                 \
            p[k] = p[k] - isa##_set(u->step_size) * (m[k] / d);                                                        \
        }                                                                                                              \
        if (flushes && isa##_any_small(m, v, p) && isa##_mend(u, g0, m0, v0, p0, g, m, v, p))                          \
            return 0;                                                                                                  \
        if (__builtin_expect(isa##_any_nan(p), 0)) {                                                                   \
            for (int k = 0; k < COUNT; k++) {                                                                          \
                p[k] = isa##_one_nan(p[k]);                                                                            \
                m[k] = isa##_one_nan(m[k]);                                                                            \
                v[k] = isa##_one_nan(v[k]);                                                                            \
            }                                                                                                          \
        }                                                                                                              \
        if (!(u->stores & MOMENTS)) {                                                                                  \
            ;                                                                                                          \
        } else if (dithered) {                                                                                         \
            isa##_store_dithered((uint16_t *)u->momentum + i, (uint16_t *)u->variance + i, m, v,                       \
                                 u->index + (uint32_t)i, u->key0, u->key1);                                            \
        } else {                                                                                                       \
            isa##_store((float *)u->momentum + i, m);                                                                  \
            isa##_store((float *)u->variance + i, v);                                                                  \
        }                                                                                                              \
        if (!(u->stores & WEIGHTS))                                                                                    \
            ;                                                                                                          \
        else if (is_split)                                                                                             \
            isa##_split(p, (uint16_t *)u->weight + i, u->residual + i);                                                \
        else                                                                                                           \
            isa##_store((float *)u->weight + i, p);                                                                    \
        return 1;                                                                                                      \
    }                                                                                                                  \
                                                                                                                       \
    TARGET static __attribute__((noinline)) void isa##_step_kept(const Update *u, size_t i)                            \
    {                                                                                                                  \
        set_mode(IEEE);                                                                                                \
        isa##_step(u, i, is_split(u), u->grad_is_fp32, 1, u->dithered, 0);                                             \
        set_mode(FLUSHING);                                                                                            \
    }                                                                                                                  \
                                                                                                                       \
    TARGET INLINE void isa##_steps(const Update *update, size_t i, size_t end, int is_split, int fp32, int decoupled,  \
                                   int dithered)                                                                       \
    {                                                                                                                  \
        const Update u = *update;   /* no store can change it */                                                       \
        set_mode(u.flushes ? FLUSHING : IEEE);                                                                         \
        for (; i + UNIT <= end; i += UNIT) {                                                                           \
            if (u.stores & WEIGHTS) {                                                                                  \
                prefetch(u.weight, is_split ? 2 : 4, i);                                                               \
                if (is_split)                                                                                          \
                    prefetch(u.residual, 2, i);                                                                        \
            }                                                                                                          \
            prefetch(u.momentum, dithered ? 2 : 4, i);                                                                 \
            prefetch(u.variance, dithered ? 2 : 4, i);                                                                 \
            prefetch(u.grad, fp32 ? 4 : 2, i);                                                                         \
            for (size_t k = 0; k < UNIT; k += COUNT * WIDTH)                                                           \
                if (!isa##_step(&u, i + k, is_split, fp32, decoupled, dithered, decoupled && u.flushes))               \
                    isa##_step_kept(update, i + k);                                                                    \
        }                                                                                                              \
        set_mode(IEEE);                                                                                                \
        for (; i < end; i++)                                                                                           \
            scalar_step(&u, i, is_split, fp32, decoupled, dithered, 0);                                                \
    }                                                                                                                  \
                                                                                                                       \
    TARGET static void isa##_adam(const void *update, size_t begin, size_t end)                                        \
    {                                                                                                                  \
        const Update *u = update;                                                                                      \
        switch (u->dithered * 8 + is_split(u) * 4 + u->grad_is_fp32 * 2 + u->decoupled) {                              \
        case 0: isa##_steps(u, begin, end, 0, 0, 0, 0); break;                                                         \
        case 1: isa##_steps(u, begin, end, 0, 0, 1, 0); break;                                                         \
        case 2: isa##_steps(u, begin, end, 0, 1, 0, 0); break;                                                         \
        case 3: isa##_steps(u, begin, end, 0, 1, 1, 0); break;                                                         \
        case 4: isa##_steps(u, begin, end, 1, 0, 0, 0); break;                                                         \
        case 5: isa##_steps(u, begin, end, 1, 0, 1, 0); break;                                                         \
        case 6: isa##_steps(u, begin, end, 1, 1, 0, 0); break;                                                         \
        case 7: isa##_steps(u, begin, end, 1, 1, 1, 0); break;                                                         \
        case 12: isa##_steps(u, begin, end, 1, 0, 0, 1); break;                                                        \
        case 13: isa##_steps(u, begin, end, 1, 0, 1, 1); break;                                                        \
        case 14: isa##_steps(u, begin, end, 1, 1, 0, 1); break;                                                        \
        case 15: isa##_steps(u, begin, end, 1, 1, 1, 1); break;                                                        \
        }                                                                                                              \
    }

/* Defines <isa>_adam_coded: 8-bit moments become fp32 in a buffer that stays in the cache, are updated there, and become 8 bits again.
 * begin is a block border. */
#define BUFFER 512
#define WEIGHT_KEY (255u * 0x9E3779B9u)     /* WEIGHT_PAIR in adam.py */

#define CODED(isa, TARGET)                                                                                             \
    TARGET static void isa##_adam_coded(const void *update, size_t begin, size_t end)                                  \
    {                                                                                                                  \
        float m[BUFFER], v[BUFFER], p[BUFFER];                                                                         \
        int32_t low[BUFFER], high[BUFFER];  /* halves of the random bits */                                            \
        const Update *u = update;                                                                                      \
        for (; begin < end; begin += BUFFER) {                                                                         \
            size_t num = begin + BUFFER < end ? BUFFER : end - begin, block = begin / CODED_BLOCK;                     \
            uint8_t *momentum = (uint8_t *)u->momentum + begin, *variance = (uint8_t *)u->variance + begin;            \
            decode_moment(momentum, u->momentum_scale + block, m, num, MOMENTUM_TOP, 1);                               \
            decode_moment(variance, u->variance_scale + block, v, num, VARIANCE_TOP, 0);                               \
            Update part = *u;                                                                                          \
            part.weight = (uint16_t *)u->weight + begin;                                                               \
            part.residual = u->residual ? u->residual + begin : NULL;                                                  \
            part.grad = (const char *)u->grad + begin * (u->grad_is_fp32 ? 4 : 2);                                     \
            part.momentum = m, part.variance = v, part.dithered = 0;                                                   \
            uint16_t *weight = part.weight;                                                                            \
            if (!u->residual) {     /* no master: the weight is rounded as a bf16 moment is */                         \
                part.weight = p, part.residual = NULL;                                                                 \
                for (size_t i = 0; i < num; i++)                                                                       \
                    p[i] = bf16(weight[i]);                                                                            \
            }                                                                                                          \
            isa##_adam(&part, 0, num);                                                                                 \
            if (!u->residual)                                                                                          \
                for (uint32_t i = 0; i < num; i++) {                                                                   \
                    uint32_t random = scalar_mix(u->index + (uint32_t)begin + i, u->key0, u->key1 + WEIGHT_KEY);       \
                    weight[i] = (uint16_t)((bits_of(p[i]) + (random & 0xFFFF)) >> 16);                                 \
                }                                                                                                      \
            for (uint32_t i = 0; i < BUFFER; i++) {                                                                    \
                uint32_t random = scalar_mix(u->index + (uint32_t)begin + i, u->key0, u->key1);                        \
                low[i] = (int32_t)(random & 0xFFFF), high[i] = (int32_t)(random >> 16);                                \
            }                                                                                                          \
            encode_moment(m, low, momentum, u->momentum_scale + block, num, MOMENTUM_TOP, 1);                          \
            encode_moment(v, high, variance, u->variance_scale + block, num, VARIANCE_TOP, 0);                         \
        }                                                                                                              \
    }

ADAM(scalar, , float, 1, 1)
#if defined(__x86_64__)
ADAM(avx2, AVX2, __m256, 8, 2)
ADAM(avx512, AVX512, __m512, 16, 2)
#endif
CODED(scalar, )
#if defined(__x86_64__)
CODED(avx2, AVX2)
CODED(avx512, AVX512)
#endif

/* ---- the plain passes: the compiler vectorises them, and each order is fixed element by element ---- */

typedef struct { const float *master; uint16_t *weight; int16_t *residual; } Split;
typedef struct { const uint16_t *weight; const int16_t *residual; float *master; } Join;
typedef struct { float *dst; const void *src; int src_is_fp32, first; } Accumulate;
typedef struct { const void *grad; int grad_is_fp32; int64_t *limbs; } SumSquares;

INLINE void split_body(const void *context, size_t begin, size_t end)
{
    const Split *s = context;
    const float *restrict master = s->master;
    uint16_t *restrict weight = s->weight;
    int16_t *restrict residual = s->residual;
    for (size_t i = begin; i < end; i++) {
        uint32_t bits = bits_of(master[i]), nan = is_nan(bits);
        uint32_t quiet = (bits & 0x80000000u) | 0x7FC00000u;
        bits = nan ? quiet : bits;
        weight[i] = (uint16_t)((bits + 0x8000u) >> 16);
        residual[i] = (int16_t)(uint16_t)bits;
    }
}

INLINE void join_body(const void *context, size_t begin, size_t end)
{
    const Join *j = context;
    const uint16_t *restrict weight = j->weight;
    const int16_t *restrict residual = j->residual;
    float *restrict master = j->master;
    for (size_t i = begin; i < end; i++)
        scalar_join(weight + i, residual + i, master + i);
}

INLINE void accumulate_body(const void *context, size_t begin, size_t end)
{
    const Accumulate *a = context;
    float *restrict dst = a->dst;
    const float *restrict wide = a->src;
    const uint16_t *restrict narrow = a->src;
    if (a->first && a->src_is_fp32)
        memcpy(dst + begin, wide + begin, (end - begin) * 4);
    else if (a->first)
        for (size_t i = begin; i < end; i++) dst[i] = bf16(narrow[i]);
    else if (a->src_is_fp32)
        for (size_t i = begin; i < end; i++) dst[i] += wide[i];
    else
        for (size_t i = begin; i < end; i++) dst[i] += bf16(narrow[i]);
}

/* The sum of squares of one block: [Note: sums without an order]. */
INLINE double block_sum(const float *restrict wide, const uint16_t *restrict narrow)
{
    double lane[LANES] = {0};
    for (int row = 0; row < BLOCK; row += LANES)
        for (int j = 0; j < LANES; j++) {
            double x = wide ? wide[row + j] : bf16(narrow[row + j]);
            lane[j] += x * x;
        }
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] += lane[j + half];
    return lane[0];
}

static void add_exactly(int64_t *limbs, double sum)
{
    uint64_t bits;
    memcpy(&bits, &sum, 8);
    uint64_t mantissa = bits & 0xFFFFFFFFFFFFFu;
    unsigned exponent = (bits >> 52) & 0x7FF;
    if (exponent == 0x7FF) {
        limbs[mantissa ? 71 : 70] += 1;
        return;
    }
    mantissa |= (uint64_t)(exponent != 0) << 52;
    unsigned position = exponent + 51 + (exponent == 0);    /* sum = mantissa * 2^(position - 1126) */
    unsigned __int128 digits = (unsigned __int128)mantissa << (position % 32);
    for (int64_t *limb = limbs + position / 32; digits; digits >>= 32)
        *limb++ += (uint32_t)digits;
}

INLINE void sum_squares_body(const void *context, size_t begin, size_t end)
{
    const SumSquares *s = context;
    int64_t limbs[NUM_LIMBS] = {0};
    const float *wide = s->grad;
    const uint16_t *narrow = s->grad;
    size_t i = begin;
    if (s->grad_is_fp32) {
        float last[BLOCK] = {0};
        for (; i + BLOCK <= end; i += BLOCK)
            add_exactly(limbs, block_sum(wide + i, NULL));
        memcpy(last, wide + i, (end - i) * 4);
        add_exactly(limbs, block_sum(last, NULL));
    } else {
        uint16_t last[BLOCK] = {0};
        for (; i + BLOCK <= end; i += BLOCK)
            add_exactly(limbs, block_sum(NULL, narrow + i));
        memcpy(last, narrow + i, (end - i) * 2);
        add_exactly(limbs, block_sum(NULL, last));
    }
    for (int k = 0; k < NUM_LIMBS; k++)
        if (limbs[k])
            atomic_fetch_add_explicit((_Atomic int64_t *)s->limbs + k, limbs[k], memory_order_relaxed);
}

#define PASSES(isa, TARGET)                                                                                            \
    TARGET static void isa##_split_pass(const void *c, size_t begin, size_t end) { split_body(c, begin, end); }        \
    TARGET static void isa##_join_pass(const void *c, size_t begin, size_t end) { join_body(c, begin, end); }          \
    TARGET static void isa##_accumulate(const void *c, size_t begin, size_t end) { accumulate_body(c, begin, end); }   \
    TARGET static void isa##_sum_squares(const void *c, size_t begin, size_t end) { sum_squares_body(c, begin, end); }

PASSES(scalar, )
#if defined(__x86_64__)
PASSES(avx2, AVX2)
PASSES(avx512, AVX512)
#endif

typedef void (*Pass)(const void *context, size_t begin, size_t end);

static const struct Isa { const char *name; Pass adam, adam_coded, split, join, accumulate, sum_squares; } ISAS[] = {
    {"scalar", scalar_adam, scalar_adam_coded, scalar_split_pass, scalar_join_pass, scalar_accumulate, scalar_sum_squares},
#if defined(__x86_64__)
    {"avx2", avx2_adam, avx2_adam_coded, avx2_split_pass, avx2_join_pass, avx2_accumulate, avx2_sum_squares},
    {"avx512", avx512_adam, avx512_adam_coded, avx512_split_pass, avx512_join_pass, avx512_accumulate, avx512_sum_squares},
#endif
};

/* The number of ISAS that this CPU and its operating system have. */
static int num_isas(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return 3;
    return __builtin_cpu_supports("avx2") ? 2 : 1;
#else
    return 1;
#endif
}

/* ---- the pool ---- */

/* [Note: one job at a time]
 * A caller holds `entry` for its whole job, so `job` has one writer. The caller wakes all workers. The first `job.helpers`
 * workers take tiles beside the caller until none is left, and then count themselves out. The caller returns when the count
 * is 0, so no worker still reads the job's context. Workers are created at their first use and never joined. They take no
 * signals and do not survive a fork: the child starts with an empty pool, whatever the state of the parent's locks.
 */
typedef struct { Pass pass; const void *context; size_t numel; int helpers; } Job;

static struct {
    pthread_mutex_t entry, lock;
    pthread_cond_t wake, idle;
    int num_workers, num_busy;
    uint64_t serial;            /* of the job */
    Job job;
    atomic_size_t next;         /* begin of the next tile */
} pool = {.entry = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER, .idle = PTHREAD_COND_INITIALIZER};

static void forget_pool(void)
{
    pthread_mutex_init(&pool.entry, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.idle, NULL);
    pool.num_workers = pool.num_busy = 0;
}

static void take_tiles(const Job *job)
{
    size_t begin;
    while ((begin = atomic_fetch_add(&pool.next, TILE)) < job->numel)
        job->pass(job->context, begin, begin + TILE < job->numel ? begin + TILE : job->numel);
}

static void *worker(void *index)
{
    uint64_t seen = 0;
    set_mode(IEEE);
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.serial == seen)
            pthread_cond_wait(&pool.wake, &pool.lock);
        seen = pool.serial;
        if ((intptr_t)index >= pool.job.helpers)
            continue;
        Job job = pool.job;
        pthread_mutex_unlock(&pool.lock);
        take_tiles(&job);
        pthread_mutex_lock(&pool.lock);
        if (--pool.num_busy == 0)
            pthread_cond_signal(&pool.idle);
    }
    return NULL;
}

/* Makes workers up to `wanted`. Fewer is no error, because the caller works too. */
static void hire(int wanted)
{
    sigset_t all, saved;
    pthread_attr_t attr;
    pthread_t thread;
    sigfillset(&all);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &saved);
    while (pool.num_workers < wanted
           && pthread_create(&thread, &attr, worker, (void *)(intptr_t)pool.num_workers) == 0)
        pool.num_workers++;
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
    pthread_attr_destroy(&attr);
}

static int default_threads(void)
{
    cpu_set_t cpus;     /* too small where there are over 1,024 */
    return sched_getaffinity(0, sizeof cpus, &cpus) ? MAX_THREADS : CPU_COUNT(&cpus);
}

/* Runs pass over [0, numel) in tiles. The caller does not hold the GIL. */
static void run(Pass pass, const void *context, size_t numel, int threads)
{
    size_t num_tiles = (numel + TILE - 1) / TILE;
    if (threads <= 0)
        threads = default_threads();
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    if ((size_t)threads > num_tiles)
        threads = (int)num_tiles;
    if (threads <= 1) {
        pass(context, 0, numel);
        return;
    }
    pthread_mutex_lock(&pool.entry);
    pthread_mutex_lock(&pool.lock);
    hire(threads - 1);
    pool.num_busy = threads - 1 < pool.num_workers ? threads - 1 : pool.num_workers;
    pool.job = (Job){pass, context, numel, pool.num_busy};
    atomic_store(&pool.next, 0);
    pool.serial++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    take_tiles(&pool.job);
    pthread_mutex_lock(&pool.lock);
    while (pool.num_busy)
        pthread_cond_wait(&pool.idle, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.entry);
}

/* ---- the module ---- */

typedef unsigned long long Address;
#define AT(address) ((void *)(uintptr_t)(address))

static const struct Isa *widest(void) { return &ISAS[num_isas() - 1]; }

static PyObject *finish(Pass pass, const void *context, Py_ssize_t numel, int threads)
{
    if (numel < 0)
        return PyErr_Format(PyExc_ValueError, "numel is %zd, expected 0 or more", numel);
    if (numel == 0)     /* addresses may be 0 */
        Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS
    unsigned saved = set_mode(IEEE);
    run(pass, context, (size_t)numel, threads);
    set_mode(saved);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

INLINE int within(float x, float least, float most) { return x >= least && x <= most; }

/* Whether [Note: denormals at full speed] holds for these scalars. A denormal scalar would be flushed too. */
static void plan_flushes(Update *u)
{
    const float normal = 0x1p-126f;
    float least_g = scalar_sqrt(0x1p-124f / u->one_minus_beta2) * 1.01f;
    u->flushes = u->decoupled && within(u->grad_scale, normal, 1) && within(u->decay_or_l2, 0.5f, 1)
                 && (u->beta1 == 0 || within(u->beta1, 0.5f, 1)) && within(u->one_minus_beta1, normal, 1)
                 && within(u->beta2, 0.5f, 1) && within(u->one_minus_beta2, 0x1p-20f, 1)
                 && within(u->eps, 0x1p-40f, 1) && within(u->inv_sqrt_bias2, 1, u->eps * 0x1p36f)
                 && (u->step_size == 0 || within(u->step_size, normal, 1));
    memcpy(&u->least_g, &least_g, 4);
}

static PyObject *py_isas(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *names = PyTuple_New(num_isas());
    for (int i = 0; names && i < num_isas(); i++) {
        PyObject *name = PyUnicode_FromString(ISAS[i].name);
        if (name == NULL)
            Py_CLEAR(names);
        else
            PyTuple_SetItem(names, i, name);
    }
    return names;
}

static PyObject *py_adam(PyObject *module, PyObject *args)
{
    (void)module;
    Address weight, residual, momentum, variance, momentum_scale, variance_scale, grad;
    Py_ssize_t numel;
    int grad_is_fp32, decoupled, threads, stores;
    double s[9];
    const char *name;
    PyObject *dither;
    unsigned key0 = 0, key1 = 0, index = 0;
    if (!PyArg_ParseTuple(args, "KKKKKKKnp(ddddddddd)pOizi:adam", &weight, &residual, &momentum, &variance, &momentum_scale,
                          &variance_scale, &grad, &numel, &grad_is_fp32, &s[0], &s[1], &s[2], &s[3], &s[4], &s[5], &s[6], &s[7], &s[8], &decoupled,
                          &dither, &threads, &name, &stores))
        return NULL;
    if (dither != Py_None && !PyArg_ParseTuple(dither, "III:dither", &key0, &key1, &index))
        return NULL;
    if (stores < 1 || stores > 3 || (stores != 3 && !decoupled))
        return PyErr_Format(PyExc_ValueError, "stores is %d, expected 3, or 1 or 2 for a decoupled update", stores);
    if (dither != Py_None && !residual && (stores & WEIGHTS) && !momentum_scale)
        return PyErr_Format(PyExc_ValueError, "dither goes with a split master only");
    if (momentum_scale && (stores != 3 || dither == Py_None))
        return PyErr_Format(PyExc_ValueError, "8-bit moments need dither, and stores=3");
    const struct Isa *isa = name ? NULL : widest();
    for (int i = 0; name && i < num_isas(); i++)
        if (strcmp(name, ISAS[i].name) == 0)
            isa = &ISAS[i];
    if (isa == NULL)
        return PyErr_Format(PyExc_ValueError, "isa is '%s', which this CPU does not have. Choose one of isas()", name);
    unsigned saved = set_mode(IEEE);   /* the rounding of a scalar is part of the arithmetic */
    Update u = {
        .weight = AT(weight), .residual = AT(residual), .momentum = AT(momentum), .variance = AT(variance), .grad = AT(grad),
        .momentum_scale = AT(momentum_scale), .variance_scale = AT(variance_scale),
        .grad_is_fp32 = grad_is_fp32, .stores = stores, .decoupled = decoupled, .dithered = dither != Py_None,
        .key0 = key0, .key1 = key1, .index = index,
        .grad_scale = (float)s[0], .decay_or_l2 = (float)s[1], .beta1 = (float)s[2], .one_minus_beta1 = (float)s[3],
        .beta2 = (float)s[4], .one_minus_beta2 = (float)s[5], .inv_sqrt_bias2 = (float)s[6], .eps = (float)s[7],
        .step_size = (float)s[8],
    };
    if (isa->adam != scalar_adam)
        plan_flushes(&u);
    set_mode(saved);
    return finish(momentum_scale ? isa->adam_coded : isa->adam, &u, numel, threads);
}

static PyObject *py_split(PyObject *module, PyObject *args)
{
    (void)module;
    Address master, weight, residual;
    Py_ssize_t numel;
    int threads;
    if (!PyArg_ParseTuple(args, "KKKni:split", &master, &weight, &residual, &numel, &threads))
        return NULL;
    Split s = {AT(master), AT(weight), AT(residual)};
    return finish(widest()->split, &s, numel, threads);
}

static PyObject *py_join(PyObject *module, PyObject *args)
{
    (void)module;
    Address weight, residual, master;
    Py_ssize_t numel;
    int threads;
    if (!PyArg_ParseTuple(args, "KKKni:join", &weight, &residual, &master, &numel, &threads))
        return NULL;
    Join j = {AT(weight), AT(residual), AT(master)};
    return finish(widest()->join, &j, numel, threads);
}

static PyObject *py_accumulate(PyObject *module, PyObject *args)
{
    (void)module;
    Address dst, src;
    Py_ssize_t numel;
    int src_is_fp32, first, threads;
    if (!PyArg_ParseTuple(args, "KKnppi:accumulate", &dst, &src, &numel, &src_is_fp32, &first, &threads))
        return NULL;
    Accumulate a = {AT(dst), AT(src), src_is_fp32, first};
    return finish(widest()->accumulate, &a, numel, threads);
}

static PyObject *py_sum_squares(PyObject *module, PyObject *args)
{
    (void)module;
    Address grad, limbs;
    Py_ssize_t numel;
    int grad_is_fp32, threads;
    if (!PyArg_ParseTuple(args, "KnpKi:sum_squares", &grad, &numel, &grad_is_fp32, &limbs, &threads))
        return NULL;
    SumSquares s = {AT(grad), grad_is_fp32, AT(limbs)};
    return finish(widest()->sum_squares, &s, numel, threads);
}

static PyMethodDef METHODS[] = {
    {"isas", py_isas, METH_NOARGS, "Names of the variants that this CPU has, widest last."},
    {"adam", py_adam, METH_VARARGS, "Update one shard in place."},
    {"split", py_split, METH_VARARGS, "fp32 master -> bf16 weight and int16 residual."},
    {"join", py_join, METH_VARARGS, "bf16 weight and int16 residual -> fp32 master."},
    {"accumulate", py_accumulate, METH_VARARGS, "dst = src, or dst += src."},
    {"sum_squares", py_sum_squares, METH_VARARGS, "Add the squares of a gradient to exact limbs."},
    {0},
};

static int exec_module(PyObject *module)
{
    (void)module;
    static atomic_flag registered = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&registered) && pthread_atfork(NULL, NULL, forget_pool)) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "infinity.optim._adam", .m_doc = "The arithmetic of one optimizer step on host memory.",
    .m_methods = METHODS, .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__adam(void) { return PyModuleDef_Init(&MODULE); }
