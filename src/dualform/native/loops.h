/* What all loops share: which processors they are compiled for, inner products, and PyTorch's threads.

   They are the few loops that Python takes too long for. Each has a plain twin in Python: see docs/decisions/0017-compiled-loops.md.
   Sums run in lanes of their own, so that the compiler may use vectors without being told to be careless. */
#pragma once
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
/* The loader picks what the processor can do: the library may be built on one machine and run on another */
#define LOOP __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"))) static
#define BY_PROCESSOR 1
#else
#define LOOP static
#endif

enum { LANES = 16 };
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));

/* Σ x, by halves: one number after the other, each would wait for the one before. */
static inline __attribute__((always_inline)) float total(Lanes x) {
    typedef float Half __attribute__((vector_size(2 * LANES)));
    typedef float Quarter __attribute__((vector_size(LANES)));
    const union { Lanes all; Half halves[2]; } whole = {x};
    const union { Half all; Quarter halves[2]; } half = {whole.halves[0] + whole.halves[1]};
    const Quarter rest = half.halves[0] + half.halves[1];
    return (rest[0] + rest[1]) + (rest[2] + rest[3]);
}

LOOP float dot(const float *restrict x, const float *restrict y, int64_t n) {
    Lanes first = {0}, second = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        first += *(const Lanes *)(x + i) * *(const Lanes *)(y + i);
        second += *(const Lanes *)(x + i + LANES) * *(const Lanes *)(y + i + LANES);
    }
    for (; i < n; i++) sum += x[i] * y[i];
    return sum + total(first + second);
}

/* x · x and x · y in one walk. */
LOOP void dots(const float *restrict x, const float *restrict y, int64_t n, float *own, float *both) {
    Lanes square = {0}, product = {0};
    float rest = 0, other = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const Lanes a = *(const Lanes *)(x + i);
        square += a * a;
        product += a * *(const Lanes *)(y + i);
    }
    for (; i < n; i++) {
        rest += x[i] * x[i];
        other += x[i] * y[i];
    }
    *own = rest + total(square);
    *both = other + total(product);
}

/* Work on some things, from low to high; part: the number of the thread. */
typedef void Work(void *what, int64_t low, int64_t high, int part);

#if defined(__gnu_linux__)
/* PyTorch's own threads, if its OpenMP is the common one: others beside them would be in their way. */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));

typedef struct {
    Work *work;
    void *what;
    int64_t count;
} Shared;

static void share(void *given) {
    const Shared *shared = given;
    const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
    shared->work(shared->what, shared->count * part / parts, shared->count * (part + 1) / parts, (int)part);
}

static void in_parts(Work *work, void *what, int64_t count, int64_t threads) {
    Shared shared = {work, what, count};
    if (threads > 1 && GOMP_parallel && omp_get_thread_num && omp_get_num_threads)
        GOMP_parallel(share, &shared, (unsigned)threads, 0);
    else
        work(what, 0, count, 0);
}
#else
static void in_parts(Work *work, void *what, int64_t count, int64_t threads) {
    (void)threads;
    work(what, 0, count, 0);
}
#endif

/* The same where some things take longer than others: a thread that is done with its stretch takes the next one. */
typedef struct {
    Work *work;
    void *what;
    int64_t count, stretch, next;
} Turns;

static void take_turns(void *given, int64_t low, int64_t high, int part) {
    Turns *turns = given;
    (void)low, (void)high;
    for (;;) {
        const int64_t first = __atomic_fetch_add(&turns->next, turns->stretch, __ATOMIC_RELAXED);
        if (first >= turns->count) return;
        turns->work(turns->what, first, turns->count - first < turns->stretch ? turns->count : first + turns->stretch, part);
    }
}

static inline void in_turns(Work *work, void *what, int64_t count, int64_t stretch, int64_t threads) {
    Turns turns = {work, what, count, stretch, 0};
    in_parts(take_turns, &turns, threads, threads);
}

enum { WORTH = 1 << 16 }; /* so many products are worth a second thread */
