// Which instruction set the kernels use. The bodies are compiled once per target; a choice is a value that callers hold
// and pass on, so one process may use several side by side (tests do).
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace galley::kernels {

struct KernelTable;  // function pointers of one target; see kernel_table.h

struct Isa {
  std::string name;                      ///< canonical: scalar, avx2, avx2vnni, avx3, avx3vnni, avx3dl, amx
  int lanes = 0;                         ///< fp32 lanes: output columns of a packed weight block
  int max_tile = 0;                      ///< activation rows that share one load of a weight
  const KernelTable* kernels = nullptr;  ///< static storage
};

/// Chooses by name: "best" (what this CPU does fastest), or
///   scalar    plain C++, any CPU (all that ARM has for now); slow, the reference
///   avx2      AVX2 + FMA + F16C (vpmaddubsw)          avx2vnni  and AVX-VNNI (Alder Lake, Sierra Forest)
///   avx3      AVX-512 F/BW/DQ/VL (vpmaddubsw)         avx3vnni  and AVX512-VNNI (Cascade Lake)
///   avx3dl    Ice Lake and Zen 4 and later            amx       and AMX-INT8 (Sapphire Rapids and later; Linux)
/// Throws galley::Error when the name is unknown, or known but not compiled in or not supported by this CPU.
Isa select_isa(std::string_view name = "best");

/// Names select_isa accepts on this CPU, best first ("best" itself not included).
std::vector<std::string> supported_isas();

/// One line for `doctor`: "compiled: avx3dl avx3 avx2 scalar; supported here: avx2 scalar; best: avx2".
std::string isa_report();

}  // namespace galley::kernels
