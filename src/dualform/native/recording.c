/* Recording: the slots of a backward pass. */
#include "loops.h"
#ifdef BY_PROCESSOR
#include <immintrin.h>
#endif

enum { TILE = 8, TOP = 15, UNIT = 126 + TOP }; /* TOP, UNIT: as in store/encoding.py */

/* The nearest float16, ties to even; |x| < 65520. */
static inline uint16_t half(float x) {
    uint32_t bits, small, sign;
    float tiny;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    memcpy(&tiny, &bits, 4);
    tiny += 0.5f; /* its last bits are then those of a subnormal float16, rounded by the processor */
    memcpy(&small, &tiny, 4);
    uint32_t normal = (bits + 0xfffu + (bits >> 13 & 1u) - (112u << 23)) >> 13;
    return (uint16_t)(sign | (bits < 113u << 23 ? small - 0x3f000000u : normal));
}

LOOP float largest(const float *restrict x, int64_t n) {
    float found = 0;
    for (int64_t i = 0; i < n; i++) found = fabsf(x[i]) > found ? fabsf(x[i]) : found;
    return found;
}

LOOP void plain_halves(const float *restrict x, float scale, uint16_t *restrict out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = half(x[i] * scale);
}

#ifdef BY_PROCESSOR
/* The same by an instruction, where there is one; gives how many it has done. */
__attribute__((target("avx,f16c"))) static int64_t halves_at_once(const float *x, float scale, uint16_t *out, int64_t n) {
    const __m256 by = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_mul_ps(_mm256_loadu_ps(x + i), by), _MM_FROUND_TO_NEAREST_INT));
    return i;
}
#endif

static void halves(const float *x, float scale, uint16_t *out, int64_t n) {
    int64_t done = 0;
#ifdef BY_PROCESSOR
    if (__builtin_cpu_supports("avx2")) done = halves_at_once(x, scale, out, n);
#endif
    if (done < n) plain_halves(x + done, scale, out + done, n - done);
}

/* Flags which of the rows of x (n, d) are zero; returns how many. Most rows are left at their first number. */
int64_t zero_rows(int64_t n, int64_t d, const float *x, uint8_t *flags) {
    int64_t count = 0;
    for (int64_t row = 0; row < n; row++) {
        const float *own = x + row * d;
        int64_t i = 0;
        while (i < d && own[i] == 0) i++;
        flags[row] = i == d;
        count += flags[row];
    }
    return count;
}

/* sum[o] += Σ_i factor[i] x[i][o] and plain[o] += Σ_i x[i][o] over TILE vectors, or the fewer that there are. */
LOOP void add(const float *restrict x, const float *restrict factor, int64_t rows, double *restrict sum, double *restrict plain, int64_t n) {
    if (rows == TILE)
        for (int64_t o = 0; o < n; o++) {
            float here = 0, as_it_is = 0;
            for (int i = 0; i < TILE; i++) {
                here += factor[i] * x[i * n + o];
                as_it_is += x[i * n + o];
            }
            sum[o] += here;
            plain[o] += as_it_is;
        }
    else
        for (int64_t i = 0; i < rows; i++)
            for (int64_t o = 0; o < n; o++) {
                sum[o] += factor[i] * x[i * n + o];
                plain[o] += x[i * n + o];
            }
}

/* The same for a layer of few outputs, whose sums lie so many places apart. */
static void add_apart(const float *x, const float *factor, int64_t rows, double *sum, int64_t apart, int64_t n) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t o = 0; o < n; o++) sum[o * apart] += factor[i] * x[i * n + o];
}

/* Store a vector, given its squared norm: in float32 (exponent NULL) or in float16 with a power of two. */
static void store(const float *x, float square, int64_t n, int as_it_is, void *out, int16_t *exponent) {
    if (!exponent) {
        memcpy(out, x, sizeof(float) * (size_t)n);
        return;
    }
    float bound = sqrtf(square), scale;
    if (!(bound > 1e-15f && bound < 1e15f)) {
        bound = largest(x, n);
        bound = fminf(fmaxf(bound, 0x1p-100f), 0x1p127f);
    }
    uint32_t raised;
    memcpy(&raised, &bound, 4);
    raised >>= 23;
    if (as_it_is && raised >= 127 && raised < 127 + TOP) raised = UNIT;
    *exponent = (int16_t)((int32_t)raised - UNIT);
    uint32_t bits = (253u + TOP - raised) << 23;
    memcpy(&scale, &bits, 4);
    halves(x, scale, out, n);
}

/* The slots of one call: keys (n, d_in), error signals (n, d_out), and random, (k, d_in). stored_errors NULL: only keys are kept.
   exponents NULL: float32 is stored. */
typedef struct {
    int64_t n, d_in, d_out, k;
    const float *keys, *errors, *random;
    char *stored_keys;
    int16_t *key_exponents;
    char *stored_errors;
    int16_t *error_exponents;
    double *sums;
} Call;

typedef struct {
    const Call *calls;
    int64_t count, threads, size;
} Calls;

static const float ones[TILE] = {1, 1, 1, 1, 1, 1, 1, 1};

static int64_t size_of(const Call *s) { return (s->k + 1) * s->d_out + 3; }

static void some_slots(const Call *s, int64_t first, int64_t end, double *sums) {
    const int64_t d_in = s->d_in, d_out = s->d_out, k = s->k;
    const size_t width = s->key_exponents ? sizeof(uint16_t) : sizeof(float);
    double *squares = sums + (k + 1) * d_out;
    for (int64_t low = first; low < end; low += TILE) {
        const int64_t rows = end - low < TILE ? end - low : TILE;
        const float *some = s->errors + low * d_out;
        float seen[TILE];
        for (int64_t i = 0; i < rows; i++) {
            const float *key = s->keys + (low + i) * d_in, *error = some + i * d_out;
            const float error_square = dot(error, error, d_out);
            float key_square;
            dots(key, s->random, d_in, &key_square, seen + i);
            squares[0] += error_square;
            squares[2] += key_square;
            if (!(key_square <= FLT_MAX && error_square <= FLT_MAX)) {
                squares[0] = INFINITY;
                return;
            }
            store(key, key_square, d_in, 1, s->stored_keys + width * (size_t)((low + i) * d_in),
                  s->key_exponents ? s->key_exponents + low + i : NULL);
            if (s->stored_errors)
                store(error, error_square, d_out, 0, s->stored_errors + width * (size_t)((low + i) * d_out),
                      s->error_exponents ? s->error_exponents + low + i : NULL);
        }
        for (int64_t column = 0; column < k; column++) {
            for (int64_t i = 0; i < rows; i++) {
                if (column) seen[i] = dot(s->keys + (low + i) * d_in, s->random + column * d_in, d_in);
                squares[1] += (double)seen[i] * seen[i];
            }
            if (k == 1)
                add(some, seen, rows, sums, sums + d_out, d_out);
            else
                add_apart(some, seen, rows, sums + column, k, d_out);
        }
        if (k > 1) add_apart(some, ones, rows, sums + k * d_out, 1, d_out);
    }
}

/* Each thread's share of each call, into sums of its own. */
static void shares(void *what, int64_t low, int64_t high, int part) {
    const Calls *all = what;
    double *sums = all->calls->sums + part * all->size;
    for (const Call *s = all->calls; s < all->calls + all->count; sums += size_of(s++)) {
        const int64_t tiles = (s->n + TILE - 1) / TILE, end = tiles * high / all->threads * TILE;
        some_slots(s, tiles * low / all->threads * TILE, end < s->n ? end : s->n, sums);
    }
}

/* Whether the squares of a call's error signals vanish in float32, so that their norm says nothing. */
static int vanishes(const Call *s, double norm) {
    return norm < 1e-15 && largest(s->errors, s->n * s->d_out) > 0;
}

/* The slots of some calls are copied as they are stored, and of each call, one after the other,

     sums (d_out, k) = Σ error ⊗ (key · R), (d_out) = Σ error, ‖errors‖, and the norms of the keys of both: those seen through R (or
     as they are, if they nearly cancel in R), and ones.

   sums has room for as many of all these as there are threads. If ‖errors‖ is not finite, something in its call is not, or squares leave the
   range of float32: nothing that was written of it counts, and it is left to the plain way. Gives how many such calls there are. */
int64_t slots(int64_t count, Call *calls, double *sums, int64_t threads) {
    Calls all = {calls, count, threads, 0};
    int64_t work = 0, odd = 0;
    for (Call *s = calls; s < calls + count; s++) {
        s->sums = sums + all.size;
        all.size += size_of(s);
        work += s->n * (s->d_in + s->d_out);
    }
    if (work < WORTH) all.threads = 1;
    memset(sums, 0, sizeof(double) * (size_t)(all.size * all.threads));
    in_parts(shares, &all, all.threads, all.threads);
    for (int64_t part = 1; part < all.threads; part++)
        for (int64_t i = 0; i < all.size; i++) sums[i] += sums[part * all.size + i];
    for (const Call *s = calls; s < calls + count; s++) {
        double *norms = s->sums + (s->k + 1) * s->d_out;
        const double errors = sqrt(norms[0]), seen = sqrt(norms[1]), keys = sqrt(norms[2]);
        norms[0] = vanishes(s, errors) ? INFINITY : errors;
        norms[1] = keys > seen ? keys : seen;
        norms[2] = sqrt((double)s->n);
        odd += !isfinite(norms[0]);
    }
    return odd;
}
