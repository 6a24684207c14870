#include "ops/kernels/amx.h"

#include <cstdint>

#include "ops/kernels/targets.h"
#if GALLEY_HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace galley::kernels {

#if GALLEY_HAS_AMX
namespace {

// Palette 1; layout of LDTILECFG's operand.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 32};
  std::uint8_t rows[16] = {16, 8, 16};
};
static_assert(sizeof(TileConfig) == 64);
constexpr TileConfig kConfig;

}  // namespace

bool amx_granted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTileAndInt8 = 1U << 24 | 1U << 25;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTileAndInt8) != kTileAndInt8) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void set_tiles(int rows, bool begin) {
  if (rows <= kFewRows) return;
  if (begin) {
    __asm__ volatile("ldtilecfg %0" : : "m"(kConfig));
  } else {
    __asm__ volatile("tilerelease" : :);
  }
}
#else
bool amx_granted() { return false; }
void set_tiles(int, bool) {}
#endif

}  // namespace galley::kernels
