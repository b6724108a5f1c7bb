/* Equal vectors, found by their content. */
#include "loops.h"

/* A vector's name: 128 bits of its bytes and a seed (MurmurHash3's rounds). */
static void name_of(const unsigned char *x, int64_t bytes, uint64_t seed, uint64_t name[2]) {
    const uint64_t c = 0x87c37b91114253d5u, d = 0x4cf5ad432745937fu;
    uint64_t a = seed, b = seed, k[2] = {0, 0};
    for (int64_t left = bytes; left > 0; left -= 16, x += 16) {
        if (left >= 16)
            memcpy(k, x, 16); /* of a length that is known: no call */
        else {
            k[0] = k[1] = 0;
            memcpy(k, x, (size_t)left);
        }
        k[0] *= c;
        a ^= (k[0] << 31 | k[0] >> 33) * d;
        a = ((a << 27 | a >> 37) + b) * 5 + 0x52dce729;
        k[1] *= d;
        b ^= (k[1] << 33 | k[1] >> 31) * c;
        b = ((b << 31 | b >> 33) + a) * 5 + 0x38495ab5;
    }
    a += b;
    b += a;
    for (int j = 0; j < 2; j++) {
        uint64_t *h = j ? &b : &a;
        *h = (*h ^ *h >> 33) * 0xff51afd7ed558ccdu;
        *h = (*h ^ *h >> 33) * 0xc4ceb9fe1a85ec53u;
        *h ^= *h >> 33;
    }
    name[0] = a + b;
    name[1] = b + name[0];
}

/* Where a name is in a table of (name, name, number + 1), or where it would be. */
static uint64_t *found_in(uint64_t *table, int64_t capacity, const uint64_t name[2]) {
    for (int64_t i = (int64_t)(name[0] & (uint64_t)(capacity - 1));; i = (i + 1) & (capacity - 1)) {
        uint64_t *entry = table + 3 * i;
        if (!entry[2] || (entry[0] == name[0] && entry[1] == name[1])) return entry;
    }
}

/* The numbers of n vectors, by their content and seeds (NULL: none): those of the table, or new ones from `next` on, which are
   entered. in_place: a new one has the number next + its place, as if each had one.

   table: (capacity, 3), zero where empty, less than full; capacity: a power of two. places: of the new ones. Gives how many there are. */
int64_t numbered(int64_t n, int64_t bytes, const unsigned char *vectors, const int16_t *seeds, uint64_t *table, int64_t capacity,
                 int64_t next, int64_t in_place, int64_t *numbers, int64_t *places) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t name[2];
        name_of(vectors + i * bytes, bytes, seeds ? (uint64_t)(uint16_t)seeds[i] : 0, name);
        uint64_t *entry = found_in(table, capacity, name);
        if (!entry[2]) {
            entry[0] = name[0];
            entry[1] = name[1];
            entry[2] = (uint64_t)(next + (in_place ? i : count) + 1);
            places[count++] = i;
        }
        numbers[i] = (int64_t)entry[2] - 1;
    }
    return count;
}

/* Enter all of one table into a larger one. */
void moved(const uint64_t *old, int64_t size, uint64_t *table, int64_t capacity) {
    for (const uint64_t *entry = old; entry < old + 3 * size; entry += 3)
        if (entry[2]) memcpy(found_in(table, capacity, entry), entry, 3 * sizeof *entry);
}
