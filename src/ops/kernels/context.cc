#include <algorithm>

#include "ops/kernels/scratch.h"

namespace galley::kernels {

Context::Context(Isa isa, int threads, int spin_us)
    : isa_(std::move(isa)), pool_(threads, spin_us), max_tile_(isa_.max_tile), scratch_(std::make_unique<Scratch>()) {
  scratch_->threads.resize(static_cast<std::size_t>(threads));
}

Context::~Context() = default;

void Context::set_max_tile(int rows) { max_tile_ = std::clamp(rows, 1, isa_.max_tile); }

}  // namespace galley::kernels
