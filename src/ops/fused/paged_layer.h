// What the fused backend asks of a layer's KV: a paged view that its kernels write to and read from.
#pragma once
#include "ops/kernels/paged_kv.h"
#include "ops/ops.h"

namespace galley::ops {

struct PagedLayerKv final : LayerKv {
  kernels::PagedKv view;
  int table = 0;  ///< which of the step's block tables it is found through
};

}  // namespace galley::ops
