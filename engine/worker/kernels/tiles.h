// Tiles (AMX): products of 16 by 16 numbers in one instruction, on CPUs that have them where the system lets us.

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

// Whether the system lets this process use tiles (Linux's ARCH_REQ_XCOMP_PERM for XTILEDATA).
inline bool may_use_tiles() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}

// Eight tiles of 16 rows of 64 bytes for the calling thread, until end_tiles.
inline void begin_tiles() {
    if (!may_use_tiles()) return;
    struct alignas(64) {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const config;
    _tile_loadconfig(&config);
}

inline void end_tiles() {
    if (may_use_tiles()) _tile_release();
}

#else

inline bool may_use_tiles() { return false; }
inline void begin_tiles() {}
inline void end_tiles() {}

#endif

}  // namespace
