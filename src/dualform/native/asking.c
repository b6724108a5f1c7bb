/* Questions: the scores of one query, and the best of them. */
#include "loops.h"
#ifdef BY_PROCESSOR
#include <immintrin.h>
#endif

typedef uint16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
enum { FLOAT32, FLOAT16, BFLOAT16 }; /* as in native/picked.py */
enum { PASSED = 4096 }; /* so many scores are compared with what is needed at a time */
enum { SAMPLED = 16 }; /* one score in so many is looked at first, to see which are high: as many in a row, which lie in one line of memory */
enum { TURN = 128 }; /* so many vectors a thread takes at a time */
enum { AHEAD = 4, BYTES_AHEAD = 4096 }; /* so many vectors before it is needed, and so many bytes, the processor is told of one */

/* sums += LANES stored numbers × scale × y */
static inline __attribute__((always_inline)) void add_product(Lanes *sums, const uint16_t *x, float scale, const float *y,
                                                              int kind) {
    const Bits bits = __builtin_convertvector(*(const Shorts *)x, Bits), rest = bits & 0x7fffu;
    const Bits small = (Bits)(__builtin_convertvector((Ints)rest, Lanes) * 0x1p-24f), is_small = (Bits)(rest < 0x400u);
    const Bits large = (rest << 13) + (112u << 23) + ((Bits)(rest >= 0x7c00u) & 112u << 23);
    const Bits half = (small & is_small) | (large & ~is_small) | (bits & 0x8000u) << 16;
    *sums += (Lanes)(kind == FLOAT16 ? half : bits << 16) * scale * *(const Lanes *)y;
}

static inline __attribute__((always_inline)) float dot_of(const uint16_t *x, float scale, const float *y, int64_t n, int kind) {
    Lanes sums = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) add_product(&sums, x + i, scale, y + i, kind);
    if (i < n) {
        uint16_t last_x[LANES] = {0};
        float last_y[LANES] = {0};
        memcpy(last_x, x + i, sizeof *x * (size_t)(n - i));
        memcpy(last_y, y + i, sizeof *y * (size_t)(n - i));
        add_product(&sums, last_x, scale, last_y, kind);
    }
    return total(sums);
}

LOOP float plain_halves(const uint16_t *x, float scale, const float *y, int64_t n) { return dot_of(x, scale, y, n, FLOAT16); }
LOOP float dot_brains(const uint16_t *x, float scale, const float *y, int64_t n) { return dot_of(x, scale, y, n, BFLOAT16); }

#ifdef BY_PROCESSOR
/* The product of float16 by an instruction for it, where there is one; of a multiple of so many numbers. */
enum { AT_ONCE = 16 };
__attribute__((target("avx2,fma,f16c"))) static float halves_at_once(const uint16_t *x, const float *y, int64_t n) {
    __m256 first = _mm256_setzero_ps(), second = first;
    for (int64_t i = 0; i < n; i += AT_ONCE) {
        const __m256i some = _mm256_loadu_si256((const __m256i *)(x + i));
        first = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(some)), _mm256_loadu_ps(y + i), first);
        second = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(some, 1)), _mm256_loadu_ps(y + i + 8), second);
    }
    float sums[8];
    _mm256_storeu_ps(sums, _mm256_add_ps(first, second));
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}
#endif

static float dot_halves(const uint16_t *x, float scale, const float *y, int64_t n) {
#ifdef BY_PROCESSOR
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        const int64_t most = n / AT_ONCE * AT_ONCE;
        const float sum = scale * halves_at_once(x, y, most);
        return most < n ? sum + plain_halves(x + most, scale, y + most, n - most) : sum;
    }
#endif
    return plain_halves(x, scale, y, n);
}

/* How many of n numbers, which ascend, are below a limit. */
static int64_t below(const int64_t *numbers, int64_t n, int64_t limit) {
    int64_t found = 0;
    while (found < n) {
        const int64_t middle = found + (n - found) / 2;
        if (numbers[middle] < limit)
            found = middle + 1;
        else
            n = middle;
    }
    return found;
}

/* Queries (m, d), and n numbers of vectors in t tables, of which each goes on counting where the one before ends.

   ends (t): the number after each table's last; tables (t): where it begins; exponents (t): of its vectors' powers of
   two, or NULL. Numbers that ascend are found at once. */
typedef struct {
    int64_t n, t, d, m, kind;
    const int64_t *numbers, *ends;
    const char *const *tables;
    const int16_t *const *exponents;
    const float *queries;
    float *out;
    int missing;
} Picked;

static void some_picked(void *what, int64_t low, int64_t high, int part) {
    Picked *p = what;
    const int64_t n = p->n, d = p->d, bytes = d * (p->kind == FLOAT32 ? 4 : 2), *numbers = p->numbers, *ends = p->ends;
    const int64_t ahead = bytes * AHEAD < BYTES_AHEAD ? BYTES_AHEAD / (bytes ? bytes : 1) : AHEAD;
    (void)part;
    for (int64_t i = low, table = low < high ? below(ends, p->t, numbers[low]) : 0; i < high; i++) {
        const int64_t number = numbers[i], soon = i + ahead < n ? numbers[i + ahead] : number;
        if (number < 0 || !p->t || number >= ends[p->t - 1]) {
            __atomic_store_n(&p->missing, 1, __ATOMIC_RELAXED);
            return;
        }
        while (number >= ends[table]) table++;
        while (table && number < ends[table - 1]) table--;
        const int64_t row = number - (table ? ends[table - 1] : 0);
        const char *vector = p->tables[table] + row * bytes;
        const float scale = p->exponents[table] ? ldexpf(1, p->exponents[table][row]) : 1;
        /* Mostly in the same table; where not, a hint does no harm */
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(vector + (soon - number) * bytes + byte, 0, 2);
        for (int64_t q = 0; q < p->m; q++) {
            const float *query = p->queries + q * d;
            const float found = p->kind == FLOAT32   ? dot((const float *)vector, query, d)
                                : p->kind == FLOAT16 ? dot_halves((const uint16_t *)vector, scale, query, d)
                                                     : dot_brains((const uint16_t *)vector, scale, query, d);
            p->out[q * n + i] = found;
        }
    }
}

/* out (m, n) = queries · the vectors with these numbers; each is read from where it lies. Gives 0; 1: there is no such number. */
int picked(int64_t n, int64_t t, int64_t d, int64_t m, int64_t kind, const int64_t *numbers, const int64_t *ends,
           const char *const *tables, const int16_t *const *exponents, const float *queries, float *out, int64_t threads) {
    Picked all = {n, t, d, m, kind, numbers, ends, tables, exponents, queries, out, 0};
    in_turns(some_picked, &all, n, TURN, n * d < WORTH ? 1 : threads);
    return all.missing;
}

/* Scores in their order as whole numbers: NaN is above all, −0 is 0, and of equal scores that of the lower place is higher. */
static inline uint64_t standing(float score, int64_t place) {
    uint32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, 4);
    bits = score != score ? UINT32_MAX : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (UINT32_MAX - (uint32_t)place);
}

/* Bring the k highest of n numbers to the front, in any order; the lowest of them is then x[k - 1]. */
static void to_the_front(uint64_t *x, int64_t n, int64_t k) {
    for (int64_t low = 0, high = n - 1; low < high;) {
        const uint64_t middle = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > middle) i++;
            while (x[j] < middle) j--;
            if (i <= j) {
                const uint64_t other = x[i];
                x[i++] = x[j];
                x[j--] = other;
            }
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            return;
    }
}

/* out (n): whether a number is not below what its group needs */
LOOP void compare(int64_t n, const float *restrict bound, const int32_t *codes, const float *least, char *restrict out) {
    if (codes)
        for (int64_t i = 0; i < n; i++) out[i] = !(bound[i] < least[codes[i]]);
    else
        for (int64_t i = 0; i < n; i++) out[i] = !(bound[i] < *least);
}

#ifdef BY_PROCESSOR
/* The same of few groups, whose needs fit into two registers: eight numbers at a time, a bit for each. */
enum { FEW = 16 };
__attribute__((target("avx2"))) static void compare_at_once(int64_t n, const float *bound, const int32_t *codes, const float least[FEW],
                                                            uint8_t *out) {
    const __m256 low = _mm256_loadu_ps(least), high = _mm256_loadu_ps(least + 8);
    __m256 needed = _mm256_broadcast_ss(least);
    for (int64_t i = 0; i < n; i += 8) {
        if (codes) {
            const __m256i code = _mm256_loadu_si256((const __m256i *)(codes + i));
            const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)); /* 8 is then the sign */
            needed = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code), is_high);
        }
        out[i / 8] = (uint8_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(bound + i), needed, _CMP_NLT_UQ));
    }
}
#endif

/* Eight bytes that are 0 or 1 as bits (where the lowest comes first, as everywhere by now). */
static inline uint64_t packed(const char *bytes) {
    uint64_t eight;
    memcpy(&eight, bytes, 8);
    return eight * 0x0102040810204080u >> 56;
}

/* out: a bit for each of n ≤ PASSED numbers, whether it is not below what its group needs; the last word is filled up with 0. */
static void flag(int64_t n, const float *bound, const int32_t *codes, const float *least, int64_t groups, uint64_t *out) {
    char bytes[PASSED + 8];
    int64_t done = 0;
    memset(out, 0, sizeof *out * (size_t)((n + 63) / 64));
#ifdef BY_PROCESSOR
    if (groups <= FEW && __builtin_cpu_supports("avx2")) {
        float table[FEW] = {0};
        memcpy(table, least, sizeof *least * (size_t)groups);
        done = n / 8 * 8;
        compare_at_once(done, bound, codes, table, (uint8_t *)out);
    }
#else
    (void)groups;
#endif
    if (done == n) return;
    compare(n - done, bound + done, codes ? codes + done : NULL, least, bytes);
    memset(bytes + n - done, 0, 8);
    for (int64_t i = done; i < n; i += 8) out[i / 64] |= packed(bytes + i - done) << i % 64;
}

typedef struct {
    int64_t groups, k, stride, parts;
    const float *scores;
    const int32_t *codes;
    uint64_t *held;
    int64_t *counts;
    float *least;
} Highest;

static void keep_highest(uint64_t *mine, int64_t *count, int64_t k) {
    to_the_front(mine, *count, k);
    *count = k;
}

static inline void offer(const Highest *h, int64_t i, uint64_t *held, int64_t *counts, float *least) {
    const int64_t group = h->codes ? h->codes[i] : 0, k = h->k;
    if (h->scores[i] < least[group]) return;
    uint64_t *mine = held + group * 2 * k;
    mine[counts[group]++] = standing(h->scores[i], i);
    if (counts[group] == 2 * k) {
        keep_highest(mine, counts + group, k);
        least[group] = h->scores[UINT32_MAX - (uint32_t)mine[k - 1]];
    }
}

/* Of one score in every stride, from low to high. least: what there is no need to look below. Most are passed over many at a time. */
static void scan(const Highest *h, int64_t low, int64_t high, uint64_t *held, int64_t *counts, float *least) {
    const int64_t row = h->stride > 1 ? SAMPLED : PASSED;
    uint64_t high_enough[PASSED / 64];
    for (int64_t i = low; i < high; i += h->stride * row) {
        const int64_t some = high - i < row ? high - i : row;
        flag(some, h->scores + i, h->codes ? h->codes + i : NULL, least, h->groups, high_enough);
        for (int64_t word = 0; word * 64 < some; word++)
            for (uint64_t bits = high_enough[word]; bits; bits &= bits - 1)
                offer(h, i + word * 64 + __builtin_ctzll(bits), held, counts, least);
    }
}

static void keep_each(int64_t groups, int64_t k, uint64_t *held, int64_t *counts) {
    for (int64_t group = 0; group < groups; group++)
        if (counts[group] > k) keep_highest(held + group * 2 * k, counts + group, k);
}

/* Of a part of the scores. Those of several parts are k at most, so that two of them fit into one. */
static void some_highest(void *what, int64_t low, int64_t high, int part) {
    const Highest *h = what;
    uint64_t *held = h->held + part * h->groups * 2 * h->k;
    int64_t *counts = h->counts + part * h->groups;
    scan(h, low, high, held, counts, h->least + part * h->groups);
    if (h->parts > 1) keep_each(h->groups, h->k, held, counts);
}

/* Of some groups, what all parts have found comes together in the first. */
static void some_joined(void *what, int64_t low, int64_t high, int part) {
    const Highest *h = what;
    (void)part;
    for (int64_t group = low; group < high; group++) {
        uint64_t *mine = h->held + group * 2 * h->k;
        for (int64_t other = 1; other < h->parts; other++) {
            const int64_t more = h->counts[other * h->groups + group];
            memcpy(mine + h->counts[group], h->held + (other * h->groups + group) * 2 * h->k, sizeof *mine * (size_t)more);
            h->counts[group] += more;
            if (h->counts[group] > h->k) keep_highest(mine, h->counts + group, h->k);
        }
        if (h->parts == 1 && h->counts[group] > h->k) keep_highest(mine, h->counts + group, h->k);
    }
}

/* What about twice as many as wanted reach, as far as one score in SAMPLED tells: if enough do, nothing below is of interest. Gives
   whether there is something to tell. */
static int guess_least(const Highest *all, int64_t n) {
    const int64_t wanted = 2 * all->k / SAMPLED;
    if (wanted < 8) return 0;
    Highest few = *all;
    few.k = wanted;
    few.stride = SAMPLED;
    for (int64_t group = 0; group < all->groups; group++) all->counts[group] = 0, all->least[group] = -INFINITY;
    scan(&few, 0, n, all->held, all->counts, all->least);
    keep_each(few.groups, wanted, all->held, all->counts);
    for (int64_t group = 0; group < all->groups; group++) {
        const uint64_t *mine = all->held + group * 2 * wanted;
        all->least[group] = all->counts[group] < wanted ? -INFINITY : all->scores[UINT32_MAX - (uint32_t)mine[wanted - 1]];
    }
    return 1;
}

/* The k highest of n scores in each group, in any order, as their standing, whose low half is 2³² − 1 − place: in held
   (groups, 2k), of which the first counts[group] ≤ k are then filled. codes (n): the group of each; NULL: there is one.
   least (groups): the k-th score, or −∞ where there are fewer. Of all three there are as many as threads, to work in. n < 2³². */
void highest(int64_t n, int64_t groups, int64_t k, const float *scores, const int32_t *codes, uint64_t *held, int64_t *counts,
             float *least, int64_t threads) {
    const int64_t parts = n < WORTH / 4 ? 1 : threads;
    Highest all = {groups, k, 1, parts, scores, codes, held, counts, least};
    for (int guessed = n >= WORTH / 4 && guess_least(&all, n);; guessed = 0) {
        for (int64_t i = 0; i < groups * parts; i++) least[i] = guessed ? least[i % groups] : -INFINITY;
        memset(counts, 0, sizeof *counts * (size_t)(groups * parts));
        in_parts(some_highest, &all, n, parts);
        in_turns(some_joined, &all, groups, 1, groups * k < WORTH / 64 ? 1 : threads);
        int enough = 1;
        for (int64_t group = 0; group < groups; group++) enough = enough && (counts[group] == k || least[group] == -INFINITY);
        if (enough || !guessed) break;
    }
    for (int64_t group = 0; group < groups; group++) {
        uint64_t lowest = UINT64_MAX;
        for (int64_t i = 0; i < counts[group]; i++) lowest = held[group * 2 * k + i] < lowest ? held[group * 2 * k + i] : lowest;
        least[group] = counts[group] < k ? -INFINITY : scores[UINT32_MAX - (uint32_t)lowest];
    }
}
