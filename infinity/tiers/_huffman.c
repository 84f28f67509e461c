/* _huffman: compresses floating-point numbers without loss.
 *
 * Knows bytes. Must not know records, tiers or files. Functions drop the GIL while they compute. Any number of threads may call.
 * The file is long because encoder and decoder share the format, and change together.
 *
 *   encode(source, itemsize, target) -> int
 *       Code source into target. source: n bytes, a multiple of 4096, of items of 2 (bf16, fp16) or 4 bytes (fp32). target: at least n
 *       bytes. Returns the number of coded bytes, a multiple of 4096 below n. Returns 0 if all bytes of source are zero, and n if coding
 *       saves no page. In these two cases, target has no defined content.
 *   decode_last(parts)
 *       parts: a list of (buffer, itemsize, nbytes). Decode the last nbytes of the last part's buffer in place, into the whole buffer, and
 *       remove the part from the list. No interrupt can come between. For nbytes 0, fill the buffer with zeros. For itemsize 0, only remove
 *       the part. For bytes that encode has not made, raises ValueError, and the list stays unchanged.
 *
 * [Note: coded bits]
 * Only the exponent of a float is predictable: the weights, momenta and variances of a layer have about ten different exponents. The
 * entropy of the 8 exponent bits is 2.5 to 3.6 bits. So bits 14..7 of a 2-byte float, and bits 30..23 of a 4-byte float, are a symbol.
 * Symbols get a Huffman code (Huffman 1952) of at most 11 bits. The other bits are stored as they are. (For fp16, a symbol is the exponent
 * and three bits of the mantissa.)
 *
 *     coded    256 code lengths of 4 bits, a byte that says whether signs are stored, tiles, zeros up to a multiple of 4096
 *     tile     8,192 items, fewer in the last tile: sizes of the streams (4 uint16); lower halves of fp32; sign and mantissa of the
 *              upper halves, a byte each, or 7 bits if no item has a sign, as in a variance; four streams of codes, each of a
 *              quarter of the items
 *
 * Codes are canonical: shorter codes first, then by symbol. The bits of a code are reversed, because a stream is read from the lowest bit.
 *
 * [Note: one pass over memory]
 * The largest cost is to read and to write the items. So the code of a large section comes from a sample of the items, and also covers
 * symbols near those of the sample. If an item has another symbol, or a tile does not fit, the encoder counts all items and begins again.
 * While a tile is coded or decoded, the next tile is prefetched. One table lookup codes two symbols, or decodes up to four.
 *
 * [Note: in place]
 * No coded tile is larger than the tile: encode does not code a section with such a tile. So the unread bytes lie behind the tile that is
 * written. Only the zeros at the end of the section move these bytes towards the start, by less than a tile. Before a tile is written, its
 * coded bytes and those of the next tile are therefore copied to the stack.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define PAGE 4096
#define LINE 64   /* of the cache */
#define NUM_SYMBOLS 256
#define MAX_BITS 11
#define TABLE (1 << MAX_BITS)
#define HEADER (NUM_SYMBOLS / 2 + 1)
#define TILE 8192
#define NUM_STREAMS 4
#define STREAM (TILE / NUM_STREAMS)
#define STREAM_NBYTES (STREAM * MAX_BITS / 8 + 8)   /* the largest size, and 8 bytes for an access beyond the end */
#define PAIR_SHIFT 24
#define NUM_LOOKS 5   /* table lookups for one load of 8 bytes, which has at least 57 useful bits */
#define MOST_FOUND (4 * NUM_LOOKS)   /* symbols */
#define SAMPLE 64   /* of each SAMPLED items, this many are counted in sections of at least MANY items */
#define SAMPLED 1024
#define MANY (1 << 16)
#define BEYOND 16   /* symbols below, and symbols above those of a sample, that also have codes */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "streams are of little-endian words");
_Static_assert(NUM_LOOKS * MAX_BITS <= 57 && 2 * MAX_BITS <= PAIR_SHIFT, "a look, and a pair, has its bits");
_Static_assert(PAGE / 4 % SAMPLED == 0 && SAMPLED % SAMPLE == 0, "a section has whole samples");

typedef struct { uint16_t bits[NUM_SYMBOLS]; uint8_t length[NUM_SYMBOLS]; } Code;

/* ---- the code of a section ---- */

/* Lengths of a Huffman code for one or more symbols. No length exceeds MAX_BITS, and the code fills TABLE. Two queues over the sorted counts
 * give the optimal lengths. Then lengths above MAX_BITS are cut, and other lengths change until the code fills TABLE exactly. */
static void lengths_of(const uint32_t *counts, uint8_t *lengths)
{
    uint16_t order[NUM_SYMBOLS] = {0};
    uint32_t weight[2 * NUM_SYMBOLS];
    uint16_t parent[2 * NUM_SYMBOLS];
    uint8_t depth[2 * NUM_SYMBOLS];
    int n = 0;
    memset(lengths, 0, NUM_SYMBOLS);
    for (int s = 0; s < NUM_SYMBOLS; s++) {
        if (!counts[s])
            continue;
        int at = n++;
        for (; at > 0 && counts[order[at - 1]] > counts[s]; at--)
            order[at] = order[at - 1];
        order[at] = (uint16_t)s;
    }
    if (n < 2) {   /* a code of two symbols, one of which is never used */
        lengths[order[0]] = lengths[order[0] ^ 1] = 1;
        return;
    }
    for (int i = 0; i < n; i++)
        weight[i] = counts[order[i]];
    int leaf = 0, inner = n, next = n;
    for (; next < 2 * n - 1; next++) {
        uint32_t sum = 0;
        for (int k = 0; k < 2; k++) {
            int child = inner >= next || (leaf < n && weight[leaf] <= weight[inner]) ? leaf++ : inner++;
            sum += weight[child];
            parent[child] = (uint16_t)next;
        }
        weight[next] = sum;
    }
    depth[next - 1] = 0;
    for (int i = next - 2; i >= 0; i--)
        depth[i] = depth[parent[i]] + 1;
    uint32_t taken = 0;   /* places of TABLE */
    for (int i = 0; i < n; i++) {
        depth[i] = depth[i] > MAX_BITS ? MAX_BITS : depth[i];
        taken += TABLE >> depth[i];
    }
    for (int i = 0; taken > TABLE; i = i + 1 < n ? i + 1 : 0)   /* longer codes, for the rarest symbols first */
        if (depth[i] < MAX_BITS) {
            taken -= TABLE >> (depth[i] + 1);
            depth[i]++;
        }
    for (int i = n - 1; i >= 0; i--)   /* shorter codes in the free places, for the commonest symbols first */
        while (taken + (TABLE >> depth[i]) <= TABLE && depth[i] > 1) {
            taken += TABLE >> depth[i];
            depth[i]--;
        }
    for (int i = 0; i < n; i++)
        lengths[order[i]] = depth[i];
}

static uint16_t reversed(uint32_t bits, int length)
{
    uint32_t r = 0;
    for (int i = 0; i < length; i++)
        r |= (bits >> i & 1) << (length - 1 - i);
    return (uint16_t)r;
}

/* The canonical code of these lengths. Returns the number of places of the code. For lengths that `lengths_of` made, this is TABLE. */
static uint32_t assign(const uint8_t *lengths, Code *code)
{
    uint32_t place = 0;
    memset(code, 0, sizeof *code);
    for (int length = 1; length <= MAX_BITS; length++)
        for (int s = 0; s < NUM_SYMBOLS; s++)
            if (lengths[s] == length) {
                if (place < TABLE) {
                    code->bits[s] = reversed(place >> (MAX_BITS - length), length);
                    code->length[s] = (uint8_t)length;
                }
                place += TABLE >> length;
            }
    return place;
}

/* Codes of pairs of symbols, by second << 8 | first: both codes, and from PAIR_SHIFT on the number of bits. Only for symbols with codes. */
static void pairs_of(const Code *code, uint32_t *pairs)
{
    int coded[NUM_SYMBOLS], n = 0;
    for (int s = 0; s < NUM_SYMBOLS; s++)
        if (code->length[s])
            coded[n++] = s;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++) {
            int second = coded[i], first = coded[k], length = code->length[first];
            pairs[second << 8 | first] = code->bits[first] | (uint32_t)code->bits[second] << length
                                         | (uint32_t)(length + code->length[second]) << PAIR_SHIFT;
        }
}

/* The symbols, at most 4, whose codes end within the next MAX_BITS of a stream. `find` loads the 8 bytes at once. */
typedef struct { uint8_t symbols[4], count, num_bits, first_num_bits, unused; } Found;
_Static_assert(sizeof(Found) == 8 && offsetof(Found, count) == 4 && offsetof(Found, num_bits) == 5, "as `find` takes it apart");

static void table_of(const Code *code, Found *table)
{
    uint8_t symbol[TABLE], length[TABLE];
    for (int s = 0; s < NUM_SYMBOLS; s++)
        if (code->length[s])
            for (int i = code->bits[s]; i < TABLE; i += 1 << code->length[s]) {
                symbol[i] = (uint8_t)s;
                length[i] = code->length[s];
            }
    for (int i = 0; i < TABLE; i++) {
        Found found = {.first_num_bits = length[i]};
        for (int bits = i; found.count < 4 && found.num_bits + length[bits] <= MAX_BITS; bits = i >> found.num_bits) {
            found.symbols[found.count++] = symbol[bits];
            found.num_bits += length[bits];
        }
        table[i] = found;
    }
}

/* ---- tiles ---- */

INLINE uint64_t load64(const uint8_t *at) { uint64_t x; memcpy(&x, at, 8); return x; }
INLINE void store64(uint8_t *at, uint64_t x) { memcpy(at, &x, 8); }

/* Prefetches a cache line. The address may lie beyond the end of a section. */
INLINE void fetch(const uint8_t *from, size_t offset) { __builtin_prefetch((const void *)((uintptr_t)from + offset), 0, 2); }

INLINE uint8_t symbol_of(uint16_t high) { return (uint8_t)(high >> 7); }
INLINE uint8_t rest_of(uint16_t high) { return (uint8_t)((high >> 8 & 0x80) | (high & 0x7F)); }
INLINE uint16_t high_of(uint8_t symbol, uint8_t rest) { return (uint16_t)((rest & 0x80) << 8 | symbol << 7 | (rest & 0x7F)); }

/* Packs eight bytes below 128 into 56 bits; `widen` unpacks them. */
INLINE uint64_t squeeze(uint64_t x)
{
    x = (x & 0x007F007F007F007Full) | (x & 0x7F007F007F007F00ull) >> 1;
    x = (x & 0x00003FFF00003FFFull) | (x & 0x3FFF00003FFF0000ull) >> 2;
    return (x & 0x000000000FFFFFFFull) | (x & 0x0FFFFFFF00000000ull) >> 4;
}

INLINE uint64_t widen(uint64_t x)
{
    x = (x & 0x000000000FFFFFFFull) | (x & 0x00FFFFFFF0000000ull) << 4;
    x = (x & 0x00003FFF00003FFFull) | (x & 0x0FFFC0000FFFC000ull) << 2;
    return (x & 0x007F007F007F007Full) | (x & 0x3F803F803F803F80ull) << 1;
}

/* Bytes of the signs and mantissas in a coded tile. */
INLINE size_t rest_nbytes(size_t numel, int is_signed) { return is_signed ? numel : numel / 8 * 7; }

/* The range of some items. sign: whether an item has a sign. most: the largest symbol. least: the smallest symbol minus 1, modulo 256. Each
 * range contains symbol 0, which becomes 255 and does not lower the minimum. */
typedef struct { uint8_t sign, most, least; } Range;

/* The first item of sample `number`. The position within `every` items varies, because rows of a matrix often have this length. */
INLINE size_t sample_of(size_t number, size_t every)
{
    return number * every + (uint32_t)(number * 2654435761u) / 4096 % (every / SAMPLE) * SAMPLE;
}

/* Counts the symbols of SAMPLE items in each `every` items. Returns whether a counted item has a bit that is set. */
INLINE int count(const uint8_t *source, int itemsize, size_t numel, size_t every, uint32_t *counts, Range *range)
{
    uint32_t several[4][NUM_SYMBOLS] = {{0}}, seen = 0;   /* four tables: neighbours often have the same symbol */
    for (size_t number = 0; number < numel / every; number++) {
        size_t begin = sample_of(number, every), ahead = sample_of(number + 16, every);
        for (int i = 0; i < SAMPLE * itemsize; i += LINE)   /* 16 samples before they are counted */
            fetch(source, ahead * itemsize + i);
        for (size_t i = begin; i < begin + SAMPLE; i += 4)
            for (int k = 0; k < 4; k++) {
                uint32_t x = 0;
                memcpy(&x, source + (i + k) * itemsize, itemsize);
                seen |= x;
                several[k][symbol_of((uint16_t)(itemsize == 4 ? x >> 16 : x))]++;
            }
    }
    *range = (Range){(uint8_t)(seen >> (8 * itemsize - 1) & 1), 0, NUM_SYMBOLS - 1};
    for (int s = NUM_SYMBOLS - 1; s >= 0; s--) {
        counts[s] = several[0][s] + several[1][s] + several[2][s] + several[3][s];
        if (counts[s] && !range->most)
            range->most = (uint8_t)s;
        if (counts[s] && s)
            range->least = (uint8_t)(s - 1);
    }
    return seen != 0;
}

/* Splits items into lower halves of fp32, symbols and the rest. The loops have the length of vectors, so that compilers vectorise them. */
INLINE Range split(const uint8_t *restrict source, int itemsize, size_t numel, uint8_t *restrict low, uint8_t *restrict symbols,
                   uint8_t *restrict rest)
{
    uint8_t sign = 0, most = 0, least = NUM_SYMBOLS - 1;
    for (size_t i = 0; i < numel; i += 32) {
        uint16_t high[32], half;
        const uint8_t *halves = itemsize == 2 ? source + 2 * i : (const uint8_t *)high;
        if (itemsize == 4)
            for (int k = 0; k < 32; k++) {
                uint32_t x;
                memcpy(&x, source + 4 * (i + k), 4);
                half = (uint16_t)x;
                memcpy(low + 2 * (i + k), &half, 2);
                high[k] = (uint16_t)(x >> 16);
            }
        for (int k = 0; k < 32; k++) {
            memcpy(&half, halves + 2 * k, 2);
            symbols[i + k] = symbol_of(half);
        }
        for (int k = 0; k < 32; k++) {
            memcpy(&half, halves + 2 * k, 2);
            rest[i + k] = rest_of(half);
        }
    }
    for (size_t i = 0; i < numel; i++) {
        uint8_t less = (uint8_t)(symbols[i] - 1);
        sign |= rest[i];
        most = symbols[i] > most ? symbols[i] : most;
        least = less < least ? less : least;
    }
    return (Range){sign >> 7, most, least};
}

/* Writes a coded tile. Returns the coded size, or 0 if this size exceeds the tile's or `room`, or if an item is not in the range. */
INLINE size_t encode_tile(const uint8_t *source, int itemsize, size_t numel, const uint32_t *pairs, Range range, uint8_t *target,
                          size_t room)
{
    uint8_t symbols[TILE], wide[TILE], streams[NUM_STREAMS][STREAM_NBYTES], *to[NUM_STREAMS];
    uint16_t sizes[NUM_STREAMS];
    uint64_t waiting[NUM_STREAMS] = {0};
    unsigned num_bits[NUM_STREAMS] = {0};
    size_t low_nbytes = numel * (itemsize - 2), quarter = numel / NUM_STREAMS;
    size_t nbytes = sizeof sizes + low_nbytes + rest_nbytes(numel, range.sign);
    if (nbytes > room)
        return 0;
    uint8_t *low = target + sizeof sizes, *packed = low + low_nbytes, *rest = range.sign ? packed : wide;
    Range found = split(source, itemsize, numel, low, symbols, rest);
    if (found.sign > range.sign || found.most > range.most || found.least < range.least)
        return 0;
    if (!range.sign) {
        for (size_t i = 0; i < numel; i += 8)
            store64(wide + i, squeeze(load64(wide + i)));
        for (size_t i = 0; i < numel; i += 8)   /* the eighth byte is overwritten by the next 7 bytes, or by the streams */
            memcpy(packed + i / 8 * 7, wide + i, 8);
    }
    for (int s = 0; s < NUM_STREAMS; s++)
        to[s] = streams[s];
    for (size_t i = 0; i < quarter; i += 4) {
        fetch(source, (numel + i * NUM_STREAMS) * itemsize);   /* the next tile */
        for (int s = 0; s < NUM_STREAMS; s++) {
            for (int k = 0; k < 4; k += 2) {   /* at most 7 bits wait, and 44 bits come */
                uint16_t pair;
                memcpy(&pair, symbols + s * quarter + i + k, 2);
                uint32_t code = pairs[pair];
                waiting[s] |= (uint64_t)(code & ((1 << PAIR_SHIFT) - 1)) << num_bits[s];
                num_bits[s] += code >> PAIR_SHIFT;
            }
            store64(to[s], waiting[s]);
            to[s] += num_bits[s] >> 3;
            waiting[s] >>= num_bits[s] & 56;
            num_bits[s] &= 7;
        }
    }
    for (int s = 0; s < NUM_STREAMS; s++) {
        if (num_bits[s])
            *to[s]++ = (uint8_t)waiting[s];
        size_t size = (size_t)(to[s] - streams[s]);
        sizes[s] = (uint16_t)size;
        if (nbytes + size > room)
            return 0;
        memcpy(target + nbytes, streams[s], size);
        nbytes += size;
    }
    memcpy(target, sizes, sizeof sizes);
    return nbytes <= numel * itemsize ? nbytes : 0;
}

/* Decodes the symbols of NUM_LOOKS table lookups to `to`, which has room for MOST_FOUND symbols. Returns the end of the symbols. */
INLINE uint8_t *find(const uint8_t *from, size_t *place, const Found *table, uint8_t *to)
{
    uint64_t bits = load64(from + (*place >> 3)) >> (*place & 7);
    for (int k = 0; k < NUM_LOOKS; k++) {
        uint64_t found, num_bits;
        memcpy(&found, table + (bits & (TABLE - 1)), 8);
        memcpy(to, &found, 4);
        to += found >> 32 & 0xFF;
        num_bits = found >> 40 & 0xFF;
        bits >>= num_bits;
        *place += num_bits;
    }
    return to;
}

/* Decodes a tile. coded: STREAM_NBYTES behind the tile may be read. next: the next coded tile, for prefetch. Returns whether the symbols
 * end exactly at the end of each stream. */
INLINE int decode_tile(const uint8_t *coded, int itemsize, size_t numel, const Found *table, int is_signed, uint8_t *target,
                       const uint8_t *next)
{
    uint8_t symbols[TILE], wide[TILE], *to[NUM_STREAMS], *end[NUM_STREAMS];
    uint16_t sizes[NUM_STREAMS];
    const uint8_t *from[NUM_STREAMS];
    size_t place[NUM_STREAMS] = {0}, quarter = numel / NUM_STREAMS;   /* in bits */
    size_t ahead = 0;   /* prefetch offset in next */
    const uint8_t *low = coded + sizeof sizes, *packed = low + numel * (itemsize - 2), *rest = packed;
    memcpy(sizes, coded, sizeof sizes);
    if (!is_signed) {
        for (size_t i = 0; i < numel; i += 8)
            store64(wide + i, widen(load64(packed + i / 8 * 7)));
        rest = wide;
    }
    from[0] = packed + rest_nbytes(numel, is_signed);
    for (int s = 1; s < NUM_STREAMS; s++)
        from[s] = from[s - 1] + sizes[s - 1];
    for (int s = 0; s < NUM_STREAMS; s++) {
        to[s] = symbols + s * quarter;
        end[s] = to[s] + quarter;
    }
    while (end[0] - to[0] >= MOST_FOUND && end[1] - to[1] >= MOST_FOUND && end[2] - to[2] >= MOST_FOUND
           && end[3] - to[3] >= MOST_FOUND)
        for (int s = 0; s < NUM_STREAMS; s++, ahead += LINE * itemsize / NUM_STREAMS) {
            fetch(next, ahead);
            to[s] = find(from[s], &place[s], table, to[s]);
        }
    for (int s = 0; s < NUM_STREAMS; s++) {
        while (end[s] - to[s] >= MOST_FOUND)
            to[s] = find(from[s], &place[s], table, to[s]);
        for (; to[s] < end[s]; to[s]++) {
            const Found *found = table + (load64(from[s] + (place[s] >> 3)) >> (place[s] & 7) & (TABLE - 1));
            *to[s] = found->symbols[0];
            place[s] += found->first_num_bits;
        }
    }
    if (itemsize == 4)
        for (size_t i = 0; i < numel; i++) {
            uint16_t half;
            memcpy(&half, low + 2 * i, 2);
            uint32_t x = (uint32_t)high_of(symbols[i], rest[i]) << 16 | half;
            memcpy(target + 4 * i, &x, 4);
        }
    else
        for (size_t i = 0; i < numel; i++) {
            uint16_t high = high_of(symbols[i], rest[i]);
            memcpy(target + 2 * i, &high, 2);
        }
    for (int s = 0; s < NUM_STREAMS; s++)
        if ((place[s] + 7) >> 3 != sizes[s])
            return 0;
    return 1;
}

/* ---- sections ---- */

/* As `encode`, with a code from SAMPLE items of each `every` items. Also returns n if other items do not fit this code. */
INLINE size_t encode_by(const uint8_t *source, size_t nbytes, int itemsize, uint8_t *target, size_t every)
{
    uint32_t counts[NUM_SYMBOLS], pairs[NUM_SYMBOLS * NUM_SYMBOLS];
    uint8_t lengths[NUM_SYMBOLS];
    Code code;
    Range range;
    size_t numel = nbytes / itemsize, used = HEADER, most = nbytes - PAGE;
    int is_sample = every > SAMPLE;
    if (!count(source, itemsize, numel, every, counts, &range))
        return is_sample ? nbytes : 0;
    if (used > most)
        return nbytes;
    if (is_sample) {
        range.least = range.least > BEYOND ? range.least - BEYOND : 0;
        range.most = range.most < NUM_SYMBOLS - BEYOND ? range.most + BEYOND : NUM_SYMBOLS - 1;
    }
    for (int s = 0; s < NUM_SYMBOLS; s++)   /* every symbol in the range has a code */
        counts[s] += s == 0 || (s > range.least && s <= range.most);
    lengths_of(counts, lengths);
    assign(lengths, &code);
    pairs_of(&code, pairs);
    for (int i = 0; i < NUM_SYMBOLS / 2; i++)
        target[i] = (uint8_t)(lengths[2 * i] | lengths[2 * i + 1] << 4);
    target[HEADER - 1] = range.sign;
    for (size_t i = 0; i < numel; i += TILE) {
        size_t part = numel - i < TILE ? numel - i : TILE;
        size_t size = encode_tile(source + i * itemsize, itemsize, part, pairs, range, target + used, most - used);
        if (!size)
            return nbytes;
        used += size;
    }
    size_t whole = (used + PAGE - 1) / PAGE * PAGE;
    memset(target + used, 0, whole - used);
    return whole;
}

INLINE size_t encode(const uint8_t *source, size_t nbytes, int itemsize, uint8_t *target)
{
    size_t size = nbytes / itemsize < MANY ? nbytes : encode_by(source, nbytes, itemsize, target, SAMPLED);
    return size < nbytes ? size : encode_by(source, nbytes, itemsize, target, SAMPLE);
}

/* Copies the coded tile of numel items at `from` to `tile`. Returns the coded size, or 0 if no valid tile lies before `end`. */
INLINE size_t take(const uint8_t *from, const uint8_t *end, int itemsize, size_t numel, int is_signed, uint8_t *tile)
{
    uint16_t sizes[NUM_STREAMS];
    size_t nbytes = sizeof sizes + numel * (itemsize - 2) + rest_nbytes(numel, is_signed);
    if (end - from < (ptrdiff_t)sizeof sizes)
        return 0;
    memcpy(sizes, from, sizeof sizes);
    for (int s = 0; s < NUM_STREAMS; s++)
        nbytes += sizes[s];
    if (nbytes > numel * itemsize || (ptrdiff_t)nbytes > end - from)
        return 0;
    memcpy(tile, from, nbytes);
    return nbytes;
}

INLINE int decode(uint8_t *buffer, size_t nbytes, int itemsize, size_t coded_nbytes)
{
    uint8_t lengths[NUM_SYMBOLS], tiles[2][TILE * 4 + STREAM_NBYTES];
    Found table[TABLE];
    Code code;
    const uint8_t *coded = buffer + nbytes - coded_nbytes, *end = buffer + nbytes;
    size_t numel = nbytes / itemsize, size, part = numel < TILE ? numel : TILE;
    if (coded_nbytes < HEADER)
        return 0;
    for (int i = 0; i < NUM_SYMBOLS / 2; i++) {
        lengths[2 * i] = coded[i] & 15;
        lengths[2 * i + 1] = coded[i] >> 4;
        if (lengths[2 * i] > MAX_BITS || lengths[2 * i + 1] > MAX_BITS)
            return 0;
    }
    int is_signed = coded[HEADER - 1];
    if (is_signed > 1 || assign(lengths, &code) != TABLE)
        return 0;
    table_of(&code, table);
    coded += HEADER;
    if (!(size = take(coded, end, itemsize, part, is_signed, tiles[0])))
        return 0;
    coded += size;
    for (size_t i = 0, k = 0; i < numel; i += part, k = 1 - k) {
        part = numel - i < TILE ? numel - i : TILE;
        size_t behind = numel - i - part;
        if (behind) {
            behind = behind < TILE ? behind : TILE;
            if (coded < buffer + i * itemsize || !(size = take(coded, end, itemsize, behind, is_signed, tiles[1 - k])))
                return 0;
            coded += size;
        }
        if (!decode_tile(tiles[k], itemsize, part, table, is_signed, buffer + i * itemsize, coded))
            return 0;
    }
    return end - coded < PAGE;
}

/* The wide variants use shifts of BMI2 and vectors of AVX2, if the CPU has both. */
#if defined(__x86_64__)
#define WIDE __attribute__((target("avx2,bmi2")))
#else
#define WIDE
#endif

WIDE static size_t encode_wide(const uint8_t *source, size_t nbytes, int itemsize, uint8_t *target)
{
    return itemsize == 4 ? encode(source, nbytes, 4, target) : encode(source, nbytes, 2, target);
}

static size_t encode_plain(const uint8_t *source, size_t nbytes, int itemsize, uint8_t *target)
{
    return itemsize == 4 ? encode(source, nbytes, 4, target) : encode(source, nbytes, 2, target);
}

WIDE static int decode_wide(uint8_t *buffer, size_t nbytes, int itemsize, size_t coded_nbytes)
{
    return itemsize == 4 ? decode(buffer, nbytes, 4, coded_nbytes) : decode(buffer, nbytes, 2, coded_nbytes);
}

static int decode_plain(uint8_t *buffer, size_t nbytes, int itemsize, size_t coded_nbytes)
{
    return itemsize == 4 ? decode(buffer, nbytes, 4, coded_nbytes) : decode(buffer, nbytes, 2, coded_nbytes);
}

static int is_wide(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
#else
    return 0;
#endif
}

/* ---- Python ---- */

static int refuse(Py_ssize_t nbytes, int itemsize)
{
    if (nbytes <= 0 || nbytes % PAGE || (itemsize != 2 && itemsize != 4)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of items of %d: expected a positive multiple of %d, and items of 2 or 4", nbytes,
                     itemsize, PAGE);
        return 1;
    }
    return 0;
}

static PyObject *py_encode(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer source, target;
    int itemsize;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*iw*:encode", &source, &itemsize, &target))
        return NULL;
    if (refuse(source.len, itemsize))
        goto end;
    if (target.len < source.len) {
        PyErr_Format(PyExc_ValueError, "a target of %zd bytes for a source of %zd: expected at least as many", target.len, source.len);
        goto end;
    }
    size_t nbytes;
    Py_BEGIN_ALLOW_THREADS
    nbytes = (is_wide() ? encode_wide : encode_plain)(source.buf, (size_t)source.len, itemsize, target.buf);
    Py_END_ALLOW_THREADS
    result = PyLong_FromSize_t(nbytes);
end:
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    return result;
}

static PyObject *py_decode_last(PyObject *module, PyObject *parts)
{
    (void)module;
    Py_buffer buffer;
    int itemsize;
    Py_ssize_t nbytes, last = PyList_Check(parts) ? PyList_Size(parts) - 1 : -1;
    if (last < 0)
        return PyErr_Format(PyExc_ValueError, "decode_last: expected a list with something in it");
    if (!PyTuple_Check(PyList_GetItem(parts, last)))
        return PyErr_Format(PyExc_TypeError, "decode_last: expected a list of tuples");
    if (!PyArg_ParseTuple(PyList_GetItem(parts, last), "w*in:decode_last", &buffer, &itemsize, &nbytes))
        return NULL;
    int sound = 1;
    if (itemsize == 0)
        ;
    else if (refuse(buffer.len, itemsize))
        goto error;
    else if (nbytes < 0 || nbytes > buffer.len)
        sound = 0;
    else {
        Py_BEGIN_ALLOW_THREADS
        if (nbytes == 0)
            memset(buffer.buf, 0, (size_t)buffer.len);
        else
            sound = (is_wide() ? decode_wide : decode_plain)(buffer.buf, (size_t)buffer.len, itemsize, (size_t)nbytes);
        Py_END_ALLOW_THREADS
    }
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "not what was encoded");
        goto error;
    }
    PyBuffer_Release(&buffer);
    if (PyList_SetSlice(parts, last, last + 1, NULL))
        return NULL;
    Py_RETURN_NONE;
error:
    PyBuffer_Release(&buffer);
    return NULL;
}

static PyMethodDef METHODS[] = {
    {"encode", py_encode, METH_VARARGS, "Code floats in fewer bytes; returns how many."},
    {"decode_last", py_decode_last, METH_O, "Make coded bytes, at the end of the last buffer, what they were."},
    {0},
};

static PyModuleDef_Slot SLOTS[] = {{0, NULL}};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "infinity.tiers._huffman", .m_doc = "Floating-point numbers in fewer bytes, without loss.",
    .m_methods = METHODS, .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__huffman(void) { return PyModuleDef_Init(&MODULE); }
