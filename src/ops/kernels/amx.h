// Internal: AMX, the tile unit of Sapphire Rapids and later. The kernels are in amx-inl.h.
#pragma once

namespace galley::kernels {

/// Whether this CPU has AMX-INT8 and the kernel lets this process use it (it must be asked; asking again is harmless).
bool amx_granted();

/// Up to here dot products are as fast, and set_tiles does nothing.
constexpr int kFewRows = 8;

/// Shapes this thread's tiles as amx-inl.h needs them, or releases them, which lets an idle core sleep deeply.
void set_tiles(int rows, bool begin);

}  // namespace galley::kernels
