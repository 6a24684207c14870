#include "ops/kernels/isa.h"

#include <array>

#include "ops/error.h"
#include "ops/kernels/amx.h"
#include "ops/kernels/kernel_table.h"
#include "ops/kernels/targets.h"
// After targets.h:
#include <hwy/targets.h>
#if HWY_ARCH_X86
#include <cpuid.h>
#endif

namespace galley::kernels {
namespace {

struct Flavour {
  const char* name;
  Level level;
  Dot dot;
  int lanes, max_tile;
};

// Best first.
constexpr std::array kFlavours = {
    Flavour{"amx", Level::avx3dl, Dot::amx, 16, 16},     Flavour{"avx3dl", Level::avx3dl, Dot::vnni, 16, 12},
    Flavour{"avx3vnni", Level::avx3, Dot::vnni, 16, 12}, Flavour{"avx3", Level::avx3, Dot::pairs, 16, 12},
    Flavour{"avx2vnni", Level::avx2, Dot::vnni, 8, 4},   Flavour{"avx2", Level::avx2, Dot::pairs, 8, 4},
    Flavour{"scalar", Level::scalar, Dot::pairs, 8, 4},
};

bool compiled(const Flavour& f) {
  switch (f.level) {
    case Level::scalar:
      return true;
    case Level::avx2:
      return (HWY_TARGETS & HWY_AVX2) != 0;
    case Level::avx3:
      return (HWY_TARGETS & HWY_AVX3) != 0;
    case Level::avx3dl:
      return (HWY_TARGETS & HWY_AVX3_DL) != 0 && (f.dot != Dot::amx || GALLEY_HAS_AMX);
  }
  return false;
}

#if HWY_ARCH_X86
bool cpu_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1U) != 0;
}
bool cpu_avx512_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (c >> 11 & 1U) != 0;
}
#else
bool cpu_avx_vnni() { return false; }
bool cpu_avx512_vnni() { return false; }
#endif

bool supported(const Flavour& f) {
  if (!compiled(f)) return false;
  const auto cpu = hwy::SupportedTargets();
  switch (f.level) {
    case Level::scalar:
      return true;
    case Level::avx2:
      return (cpu & HWY_AVX2) != 0 && (f.dot == Dot::pairs || cpu_avx_vnni());
    case Level::avx3:
      return (cpu & HWY_AVX3) != 0 && (f.dot == Dot::pairs || cpu_avx512_vnni());
    case Level::avx3dl:
      return (cpu & HWY_AVX3_DL) != 0 && (f.dot != Dot::amx || amx_granted());
  }
  return false;
}

using Tables = std::array<KernelTable, kFlavours.size()>;

const Tables& tables() {
  static const Tables kTables = [] {
    Tables all;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Flavour& f = kFlavours[i];
      if (!supported(f)) continue;  // filling a table is code of that instruction set already
      fill_scalar(all[i]);
      fill_affine<4>(f.level, f.dot, all[i]);
      fill_affine<5>(f.level, f.dot, all[i]);
      fill_affine<6>(f.level, f.dot, all[i]);
      fill_affine<8>(f.level, f.dot, all[i]);
      fill_plain(f.level, all[i]);
      if (f.dot == Dot::amx) all[i].around_products = set_tiles;
      fill_epilogue(f.level, all[i]);
      fill_attention(f.level, all[i]);
    }
    return all;
  }();
  return kTables;
}

std::string joined(const std::vector<std::string>& names) {
  std::string s;
  for (const std::string& n : names) s += (s.empty() ? "" : " ") + n;
  return s;
}

}  // namespace

Isa select_isa(std::string_view name) {
  for (std::size_t i = 0; i < kFlavours.size(); ++i) {
    const Flavour& f = kFlavours[i];
    if (name == "best" ? !supported(f) : name != f.name) continue;
    if (!supported(f)) {
      throw Error(400,
                  "instruction set " + std::string(name) +
                      (compiled(f) ? " is not supported by this CPU" : " is not compiled in") +
                      "; usable here: " + joined(supported_isas()),
                  "bad_isa", "--isa");
    }
    return {f.name, f.lanes, f.max_tile, &tables()[i]};
  }
  throw Error(400, "unknown instruction set " + std::string(name) + "; usable here: best " + joined(supported_isas()),
              "bad_isa", "--isa");
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Flavour& f : kFlavours) {
    if (supported(f)) names.emplace_back(f.name);
  }
  return names;
}

std::string isa_report() {
  std::vector<std::string> all;
  for (const Flavour& f : kFlavours) {
    if (compiled(f)) all.emplace_back(f.name);
  }
  const auto here = supported_isas();
  return "compiled: " + joined(all) + "; supported here: " + joined(here) + "; best: " + here.front();
}

}  // namespace galley::kernels
