// The configuration of a thread's AMX tiles. Include only from files compiled with AMX.
#pragma once

#include "vec16.hpp"

namespace tercet {
namespace {

constexpr int kTileHeight = 16;  // most rows of a tile
constexpr int kTileWidth = 64;   // bytes of a whole row

// As the processor reads it.
struct alignas(64) TileConfig {
    std::uint8_t palette;
    std::uint8_t start_row;
    std::uint8_t reserved[14];
    std::uint16_t columns[16];  // bytes
    std::uint8_t rows[16];
};

// Has everything that was stored so far in memory before tiles are loaded from it: the compiler does not know that the intrinsics
// read more than a pointer's worth of what they are given.
TERCET_INLINE void publish(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

TERCET_INLINE void load_config(const TileConfig& config) {
    publish(&config);
    _tile_loadconfig(&config);
}

TERCET_INLINE void set_tile(TileConfig& config, int tile, int rows, int columns = kTileWidth) {
    config.columns[tile] = static_cast<std::uint16_t>(columns);
    config.rows[tile] = static_cast<std::uint8_t>(rows);
}

}  // namespace
}  // namespace tercet
