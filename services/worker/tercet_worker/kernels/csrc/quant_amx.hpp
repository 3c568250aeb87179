// Products of bfloat16 rows with quantized weights on AMX tiles: a block of a panel is expanded to a tile, multiplied with all
// rows of the part, and its sums are scaled. Include only from files compiled with AMX.
#pragma once

#include "linear_amx.hpp"
#include "quant_kernel.hpp"

namespace tercet {
namespace {

constexpr int kAmxRows = 64;  // rows whose sums are kept at a time

// Working memory of one group of panels.
struct alignas(64) QuantTiles {
    char lines[kGroupPanels][kTileSteps * kLineBytes];  // expanded blocks
    float part[kGroupPanels][kTileHeight][kPanel];      // sums of a block, as tiles are stored
    float total[kAmxRows][kGroupPanels][kPanel];
};

// Tiles: 0 to 3 sums, 4 rows, 5 a panel.
template <class Q>
TERCET_INLINE void configure_quant(int rows) {
    TileConfig config{};
    config.palette = 1;
    for (int tile = 0; tile < 4; ++tile) set_tile(config, tile, rows);
    set_tile(config, 4, rows, 4 * Q::steps);
    set_tile(config, 5, Q::steps);
    load_config(config);
}

// Adds one block of P panels to the sums of a tile of rows.
template <class Q, int P>
TERCET_INLINE void add_block(QuantTiles& tiles, const char* x, std::int64_t x_stride, const F16 (&scale)[P], const F16 (&offset)[P],
                             const float* sums, int blocks, int first, int rows) {
    _tile_loadd(4, x, x_stride);
    _tile_zero(0);
    _tile_loadd(5, tiles.lines[0], kLineBytes);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (P > 1) {
        _tile_zero(1);
        _tile_loadd(5, tiles.lines[1], kLineBytes);
        _tile_dpbf16ps(1, 4, 5);
    }
    if constexpr (P > 2) {
        _tile_zero(2);
        _tile_loadd(5, tiles.lines[2], kLineBytes);
        _tile_dpbf16ps(2, 4, 5);
        _tile_zero(3);
        _tile_loadd(5, tiles.lines[3], kLineBytes);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, tiles.part[0], kLineBytes);
    if constexpr (P > 1) _tile_stored(1, tiles.part[1], kLineBytes);
    if constexpr (P > 2) {
        _tile_stored(2, tiles.part[2], kLineBytes);
        _tile_stored(3, tiles.part[3], kLineBytes);
    }
    for (int r = 0; r < rows; ++r) {
        for (int p = 0; p < P; ++p) {
            float* at = tiles.total[first + r][p];
            F16 total = fma16(scale[p], load16(tiles.part[p][r]), load16(at));
            if constexpr (Q::has_minimum) total = fma16(offset[p], splat16(sums[r * blocks]), total);
            store16(at, total);
        }
    }
}

template <class Q, int P>
__attribute__((noinline)) static void quant_panels_amx(const LinearCall& call, const QuantGroup& group, int blocks,
                                                       const float* sums, int panel, int row, int rows) {
    QuantTiles tiles;
    std::memset(tiles.total, 0, static_cast<std::size_t>(rows) * sizeof tiles.total[0]);
    int configured = 0;
    for (int block = 0; block < blocks; ++block) {
        const char* data = group.data + block * group.block_stride;
        F16 scale[P], offset[P];
#pragma GCC unroll 1
        for (int quarter = 0; quarter < Q::steps / 4; ++quarter) {
            expand<Q, P>(data, quarter, [&](int step, const I16(&bits)[P]) __attribute__((always_inline)) {
                for (int p = 0; p < P; ++p) std::memcpy(tiles.lines[p] + kLineBytes * step, &bits[p], kLineBytes);
            });
        }
        for (int p = 0; p < P; ++p) {
            const char* scales = data + p * Q::bytes + Q::data_bytes;
            scale[p] = load_scales<Q>(scales);
            if constexpr (Q::has_minimum) offset[p] = load_offsets<Q>(scales, scale[p]);
        }
        publish(&tiles);
        for (int first = 0; first < rows; first += kTileHeight) {
            const int count = least(rows - first, kTileHeight);
            if (configured != count) {
                configured = count;
                configure_quant<Q>(count);
            }
            const char* x = call.x + (row + first) * call.x_stride + static_cast<std::int64_t>(block) * 2 * Q::block;
            add_block<Q, P>(tiles, x, call.x_stride, scale, offset, sums + first * blocks + block, blocks, first, count);
        }
    }
    for (int r = 0; r < rows; ++r) {
        F16 total[1][P];
        for (int p = 0; p < P; ++p) total[0][p] = load16(tiles.total[r][p]);
        finish<BFloat16Linear, 1, P>(call, total, panel, row + r);
    }
}

template <class Q>
TERCET_INLINE void quant_linear_amx(const LinearCall& call, const LinearPart& part) {
    const int blocks = call.in_features / Q::block;
    alignas(64) float sums[kSumsAtOnce];
    const int most = rows_at_once(blocks, kAmxRows);
    for (int begin = part.row_begin; begin < part.row_end; begin += most) {
        const int rows = least(most, part.row_end - begin);
        if constexpr (Q::has_minimum) {
            for (int r = 0; r < rows; ++r) sum_blocks<Q>(call.x + (begin + r) * call.x_stride, blocks, sums + r * blocks);
        }
        for (int panel = part.panel_begin; panel < part.panel_end;) {
            const int left = least(part.panel_end, (panel / kGroupPanels + 1) * kGroupPanels) - panel;
            const QuantGroup group = quant_group<Q>(call.weights, blocks, call.panels, panel);
            const int panels = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            switch (panels) {
                case 4: quant_panels_amx<Q, 4>(call, group, blocks, sums, panel, begin, rows); break;
                case 2: quant_panels_amx<Q, 2>(call, group, blocks, sums, panel, begin, rows); break;
                default: quant_panels_amx<Q, 1>(call, group, blocks, sums, panel, begin, rows); break;
            }
            panel += panels;
        }
    }
    _tile_release();
}

}  // namespace
}  // namespace tercet
