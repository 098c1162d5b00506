// Tiles (AMX) in plain code, included before all else: so a CPU without them shows that what is computed with them is right.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#undef __AMX_BF16__
#define __AMX_BF16__ 1

namespace emulated {

struct Tile {
    std::uint32_t rows[16][16];
};

struct Tiles {
    Tile tiles[8];
    bool configured = false;
};

// Those of the calling thread. Without a configuration the CPU would stop the process, too.
inline Tiles& all() {
    static thread_local Tiles all;
    return all;
}

inline Tile& tile(int i) {
    if (!all().configured) __builtin_trap();
    return all().tiles[i];
}

inline void load(int to, const void* from, std::int64_t stride) {
    for (int i = 0; i < 16; ++i) std::memcpy(tile(to).rows[i], static_cast<const char*>(from) + i * stride, 64);
}

inline void put(int from, void* to, std::int64_t stride) {
    for (int i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(to) + i * stride, tile(from).rows[i], 64);
}

inline float as_float(std::uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

inline void add_products(int sums, int a, int b) {
    for (int row = 0; row < 16; ++row)
        for (int word = 0; word < 16; ++word)
            for (int column = 0; column < 16; ++column) {
                const std::uint32_t x = tile(a).rows[row][word], y = tile(b).rows[word][column];
                float sum = as_float(tile(sums).rows[row][column]);
                sum += as_float(x << 16) * as_float(y << 16);
                sum += as_float(x & 0xffff0000u) * as_float(y & 0xffff0000u);
                std::memcpy(&tile(sums).rows[row][column], &sum, sizeof sum);
            }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) (static_cast<void>(config), static_cast<void>(emulated::all().configured = true))
#define _tile_release() static_cast<void>(emulated::all().configured = false)
#define _tile_zero(to) (emulated::tile(to) = {})
#define _tile_loadd(to, from, stride) emulated::load(to, from, stride)
#define _tile_stored(from, to, stride) emulated::put(from, to, stride)
#define _tile_dpbf16ps(sums, a, b) emulated::add_products(sums, a, b)
#define syscall(...) 0L  // the system lets us use them
