// Intel AMX: multiplies matrix tiles of 16 rows in one instruction, on CPUs that have it if the system
// permits its use.

#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int TILE_ROWS = 16;

#if defined(__AMX_BF16__)

// Whether the system lets this process use AMX (Linux's ARCH_REQ_XCOMP_PERM for XTILEDATA).
inline bool has_amx() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}

// Configures eight tiles of 16 rows of 64 bytes for the calling thread, until end_amx.
inline void begin_amx() {
    if (!has_amx()) return;
    struct alignas(64) Config {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static const Config config;  // static: the compiler does not see that all of it is read
    _tile_loadconfig(&config);
}

inline void end_amx() {
    if (has_amx()) _tile_release();
}

// Accumulators of 16 rows or, with BOTH, 32 rows and 32 columns of floats, in the tiles 0 to 3. Strides are
// in 4-byte elements, from row to row.

template <bool BOTH>
inline void zero_accumulators() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BOTH) _tile_zero(2);
    if constexpr (BOTH) _tile_zero(3);
}

template <bool BOTH>
inline void load_accumulators(const float* from, std::int64_t stride) {
    _tile_loadd(0, from, stride * 4);
    _tile_loadd(1, from + 16, stride * 4);
    if constexpr (BOTH) _tile_loadd(2, from + TILE_ROWS * stride, stride * 4);
    if constexpr (BOTH) _tile_loadd(3, from + TILE_ROWS * stride + 16, stride * 4);
}

template <bool BOTH>
inline void store_accumulators(float* to, std::int64_t stride) {
    _tile_stored(0, to, stride * 4);
    _tile_stored(1, to + 16, stride * 4);
    if constexpr (BOTH) _tile_stored(2, to + TILE_ROWS * stride, stride * 4);
    if constexpr (BOTH) _tile_stored(3, to + TILE_ROWS * stride + 16, stride * 4);
}

// accumulators += a . b over 16 words, which are pairs of bf16; a: [rows, word], of which the second
// TILE_ROWS rows start at `lower`; b: [word, column]
template <bool BOTH>
inline void multiply_add(
    const std::uint32_t* a, const std::uint32_t* lower, std::int64_t a_stride, const std::uint32_t* b,
    std::int64_t b_stride) {
    _tile_loadd(6, b, b_stride * 4);
    _tile_loadd(7, b + 16, b_stride * 4);
    _tile_loadd(4, a, a_stride * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (BOTH) {
        _tile_loadd(5, lower, a_stride * 4);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

#else

inline bool has_amx() { return false; }
inline void begin_amx() {}
inline void end_amx() {}

#endif

}  // namespace
