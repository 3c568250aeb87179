// Decode steps from the worker's tables to tokens; see decode.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "draw.hpp"
#include "program.hpp"

extern "C" {

// Mirrored in kernels/decode_abi.py; raise tercet_abi_version with it. The tables of all slots, which the worker owns.
struct TercetDecodeTables {
    const std::uint8_t* occupied;  // [slots]
    std::int32_t* known;           // [slots] tokens in the buffer
    std::int32_t* computed;        // [slots] of them with KV
    const std::int32_t* cached;    // [slots] leading tokens whose KV came with the blocks: not written again
    std::int32_t* blocks;          // [slots] entries of the block table
    const std::int8_t* asks;       // [slots] not 0: something beside a token
    std::int32_t* tokens;          // [slots][max_model_len]
    std::int32_t* block_tables;    // [slots][max_blocks]
    const std::int32_t* sampling;  // [slots][sampling_stride]
    void* program;                 // layers in section 0, the head in section 1
    void* attention;
    const void* hidden;            // what section 0 leaves
    float* logits;                 // [max_rows][vocab_size]
    std::int64_t hidden_stride;
    std::int32_t slots;
    std::int32_t max_rows;
    std::int32_t max_model_len;
    std::int32_t max_blocks;
    std::int32_t block_size;
    std::int32_t num_blocks;
    std::int32_t vocab_size;
    std::int32_t sampling_stride;
    // Columns of `sampling`, float32 or int32.
    std::int32_t column_temperature;
    std::int32_t column_top_p;
    std::int32_t column_log_min_p;
    std::int32_t column_top_k;
    std::int32_t column_seed_low;
    std::int32_t column_seed_high;
    std::int32_t column_min_len;  // the length below which stop ids are masked
    std::int32_t column_asks;     // 0 where a slot takes the best token, `draws` where it draws from logits as they are
    std::int32_t draws;
};

// The columns of a plan, and where its tokens go.
struct TercetDecodePlan {
    const std::int32_t* slots;
    const std::int32_t* num_tokens;
    const std::int32_t* computed;
    const std::uint8_t* samples;
    const std::int32_t* block_offsets;  // [rows + 1]
    const std::int32_t* block_ids;
    std::int32_t* drawn;    // [rows] 0 where not finite
    float* highest;         // [rows]
    std::int64_t* places;   // [rows]
    std::uint8_t* finite;   // [rows] whether the logits are
    std::int32_t rows;
};
}

namespace tercet {

enum class DecodeOutcome : std::int32_t {
    drawn = 0,      // tokens are in `drawn` and in the tables, which have advanced
    computed = 1,   // logits are there; the caller draws from them, and advances the tables
    not_plain = 2,  // not a step for this: nothing was touched
    refused = 3,    // attention or the program refused it: the tables have its blocks, and have not advanced
};

class Decoder final : Program::Tail {
  public:
    // Throws std::bad_alloc.
    explicit Decoder(const TercetDecodeTables& tables);
    ~Decoder();
    Decoder(const Decoder&) = delete;
    Decoder& operator=(const Decoder&) = delete;

    // Throws std::bad_alloc.
    DecodeOutcome run(const TercetDecodePlan& plan);

  private:
    // How the tokens of a step are found.
    enum class Choice { best, draw, other };

    Choice choice(const TercetDecodePlan& plan) const;
    void prepare(const TercetDecodePlan& plan);
    void choose(const TercetDecodePlan& plan) const;
    void run(Stages& stages, Stages::Walk& walk) override;
    BestLogit best_of(std::int32_t row) const;

    TercetDecodeTables tables_;
    std::vector<std::uint8_t> marks_;  // [slots] to find a slot that is named twice
    std::vector<std::int32_t> token_ids_;
    std::vector<std::int64_t> positions_;
    std::vector<std::int32_t> starts_;
    std::vector<std::int32_t> lengths_;
    std::vector<std::int64_t> mapping_;

    // Of a step that draws: rows are cut into parts where there are few of them.
    std::int32_t rows_ = 0;
    std::int32_t parts_ = 1;
    std::vector<TercetDraw> draws_;                // [rows] a temperature of 0: the best token
    std::vector<BestLogit> scans_;                 // [rows][parts]
    std::vector<BestDraw> drawn_;                  // [rows][parts]
    std::vector<std::vector<Candidate>> space_;    // [threads][vocab_size], once top-k or top-p was asked for
};

}  // namespace tercet
