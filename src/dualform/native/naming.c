/* Equal vectors, found by their content. */
#include "names.h"

/* Where a name is in a table of (name, name, number + 1), or where it would be. */
static uint64_t *found_in(uint64_t *table, int64_t capacity, const uint64_t name[2]) {
    for (int64_t i = (int64_t)(name[0] & (uint64_t)(capacity - 1));; i = (i + 1) & (capacity - 1)) {
        uint64_t *entry = table + 3 * i;
        if (!entry[2] || (entry[0] == name[0] && entry[1] == name[1])) return entry;
    }
}

/* The names of n vectors, by their content and seeds (NULL: none). */
void named(int64_t n, int64_t bytes, const unsigned char *vectors, const int16_t *seeds, uint64_t *names) {
    for (int64_t i = 0; i < n; i++) name_of(vectors + i * bytes, bytes, seeds ? (uint16_t)seeds[i] : 0, names + 2 * i);
}

/* The numbers of n vectors, by their names: those of the table, or new ones from `next` on, which are entered. in_place: a new one has
   the number next + its place, as if each had one.

   table: (capacity, 3), zero where empty, less than full; capacity: a power of two. places: of the new ones. Gives how many there are. */
int64_t numbered(int64_t n, const uint64_t *names, uint64_t *table, int64_t capacity, int64_t next, int64_t in_place,
                 int64_t *numbers, int64_t *places) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t *name = names + 2 * i;
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
