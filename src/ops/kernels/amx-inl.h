// Internal: blocks of an affine matrix times a tile of up to 16 int8 rows with AMX. Included by dot-inl.h after the
// vpdpbusd flavour, inside HWY_NAMESPACE, hence no include guard. Integer sums come from the tile unit; the float part
// is that of block-inl.h, operation for operation, so both flavours give the same bits.
//
// Tiles (see set_tiles): 0 sums [16][16], 1 weights [8][16 columns][4], 2 activations [16][32]. There may be fewer
// rows: what lies behind them in the activations is multiplied too, and dropped. The CPU renames tiles, so each step
// uses the same ones.

// The compiler's own wrappers (GCC 12) do not say that they read memory.
#define GALLEY_TILE_LOAD(tile, from, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"(std::size_t{stride}) : "memory")
#define GALLEY_TILE_STORE(tile, to) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"(std::size_t{64}) : "memory")
#define GALLEY_TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define GALLEY_TILE_DOT(sums, x, w) __asm__ volatile("tdpbsud %%tmm" #w ", %%tmm" #x ", %%tmm" #sums : :)

HWY_INLINE void TileZero() { GALLEY_TILE_ZERO(0); }
// sums += activations at q times 32 rows of codes at w
HWY_INLINE void TileDot(const std::int8_t* q, const std::uint8_t* w) {
  GALLEY_TILE_LOAD(1, w, 64);
  GALLEY_TILE_LOAD(2, q, 32);
  GALLEY_TILE_DOT(0, 2, 1);
}
HWY_INLINE void TileStore(std::int32_t* to) { GALLEY_TILE_STORE(0, to); }

#undef GALLEY_TILE_LOAD
#undef GALLEY_TILE_STORE
#undef GALLEY_TILE_ZERO
#undef GALLEY_TILE_DOT

// The rows [FROM, TO) of a part's codes, a byte each.
template <int FROM, int TO>
HWY_INLINE void Unpack(const std::uint8_t* HWY_RESTRICT part, std::uint8_t* HWY_RESTRICT to) {
  if constexpr (FROM < TO) {
    hn::Store(vnni::CodeRow<FROM>(part), hn::ScalableTag<std::uint8_t>(), to + FROM * 64);
    Unpack<FROM + 1, TO>(part, to);
  }
}

// The codes of a block, part (32 inputs) after part, as tiles. They are unpacked well before they are used: a tile
// can't be loaded from stores that have not reached the cache.
template <int GROUP>
class Codes {
 public:
  HWY_INLINE Codes(const std::uint8_t* codes, int parts) : parts_(parts), next_(codes), used_(codes) {
    if constexpr (GROUP == 16) std::memset(ring_, 0, sizeof(ring_));  // each half has zeros in place of the other
    for (int i = 0; i < kAhead; i++) UnpackOne();
  }
  // The next part's tile; of groups of 16 the first half's, which the second half's follows.
  HWY_INLINE const std::uint8_t* Next() {
    if constexpr (kDirect) {
      const std::uint8_t* part = used_;
      used_ += kPart;
      return part;
    } else {
      const std::uint8_t* part = ring_ + static_cast<std::size_t>(taken_++ % kSlots) * kSlot;
      UnpackOne();
      return part;
    }
  }

 private:
  static constexpr bool kDirect = kBits == 8 && GROUP != 16;
  static constexpr int kAhead = kDirect ? 0 : 8, kSlots = kDirect ? 1 : 16;
  static constexpr std::size_t kPart = static_cast<std::size_t>(kLanes) * 4 * kBits, kSlot = GROUP == 16 ? 1024 : 512;

  HWY_INLINE void UnpackOne() {
    if (unpacked_ == parts_) return;
    std::uint8_t* to = ring_ + static_cast<std::size_t>(unpacked_++ % kSlots) * kSlot;
    if constexpr (GROUP == 16) {
      Unpack<0, 4>(next_, to);
      Unpack<4, 8>(next_, to + 512);
    } else {
      Unpack<0, 8>(next_, to);
    }
    next_ += kPart;
  }

  int parts_, unpacked_ = 0, taken_ = 0;
  const std::uint8_t *next_, *used_;
  alignas(64) std::uint8_t ring_[kSlots * kSlot];
};

// Sums of one step: [rows][16], and of the second 16 inputs where the groups are of 16.
struct Sums {
  alignas(64) std::int32_t of[2][16 * kLanes];
};

// Recursion in place of loops: an array indexed by constants alone stays in registers, across assembly too.
template <int N, int R = 0>
HWY_INLINE void Clear(VF (&acc)[N]) {
  acc[R] = hn::Zero(DF());
  if constexpr (R + 1 < N) Clear<N, R + 1>(acc);
}

template <int N, int R = 0>
HWY_INLINE void StoreRows(const VF (&acc)[N], int rows, float* HWY_RESTRICT out, std::size_t ld) {
  if (R < rows) hn::Store(acc[R], DF(), out + R * ld);
  if constexpr (R + 1 < N) StoreRows<N, R + 1>(acc, rows, out, ld);
}

// Adds half a step of activations times a group of 16, or a step times a larger one. `sum` of a group of 16: null.
template <int N, bool SYM, int GROUP, int R = 0>
HWY_INLINE void Accumulate(const std::int32_t* HWY_RESTRICT sums, const float* HWY_RESTRICT scale,
                           const float* HWY_RESTRICT sum, const std::int32_t* HWY_RESTRICT neg,
                           const vnni::Scales<SYM>& weights, VF (&acc)[N]) {
  const DF df;
  const DI di;
  VI d = hn::Load(di, sums + R * kLanes);
  if constexpr (SYM) d = hn::Add(d, hn::ShiftLeft<kBits - 1>(hn::Set(di, neg[R])));
  acc[R] = hn::MulAdd(hn::ConvertTo(df, d), hn::Mul(weights.scale, hn::Set(df, scale[R])), acc[R]);
  if constexpr (!SYM) {
    const float s = GROUP == 16 ? scale[R] * -static_cast<float>(neg[R]) : sum[R];
    acc[R] = hn::MulAdd(weights.bias, hn::Set(df, s), acc[R]);
  }
  if constexpr (R + 1 < N) Accumulate<N, SYM, GROUP, R + 1>(sums, scale, sum, neg, weights, acc);
}

// What step g is added up from.
template <int N, bool SYM, int GROUP>
HWY_INLINE void Add(const Sums& sums, const Activations& x, std::size_t cell0, int rows, int g,
                    vnni::Scales<SYM>& header, VF (&acc)[N]) {
  const std::size_t cell = cell0 + static_cast<std::size_t>(g) * rows;
  header.Next();
  if constexpr (GROUP == 16) {
    const std::int32_t* neg = x.neg16() + 2 * cell0 + static_cast<std::size_t>(2 * g) * rows;
    Accumulate<N, SYM, 16>(sums.of[0], x.scale() + cell, nullptr, neg, header, acc);
    header.Next();
    Accumulate<N, SYM, 16>(sums.of[1], x.scale() + cell, nullptr, neg + rows, header, acc);
  } else {
    Accumulate<N, SYM, GROUP>(sums.of[0], x.scale() + cell, x.sum() + cell, x.neg() + cell, header, acc);
  }
}

template <int N, bool SYM, int GROUP>
HWY_INLINE void Block(const PackedMatrix& w, const std::uint8_t* HWY_RESTRICT block, const Activations& x, int tile,
                      float* HWY_RESTRICT out, std::size_t ld, const char* fetch, std::size_t fetch_step) {
  const int rows = x.tile_rows(tile), steps = w.depth() / w.input_form().group;
  const std::size_t row0 = static_cast<std::size_t>(tile) * x.tile(), cell0 = row0 * x.groups();
  const int parts = GROUP == 0 ? w.group() / 32 : 1;
  const std::int8_t* q = x.q() + row0 * x.k();
  vnni::Scales<SYM> header{block, w.scale_kind(), w.groups_per_run()};
  Codes<GROUP> codes(block + w.header_bytes(), w.depth() / 32);
  Sums sums[2];
  VF acc[N];
  Clear(acc);
  // The tile unit works on one step while the one before is added up.
  for (int g = 0; g < steps; g++) {
    for (std::size_t o = 0; o < fetch_step; o += 64) __builtin_prefetch(fetch + o, 0, kToL2);
    fetch += fetch_step;
    TileZero();
    for (int p = 0; p < parts; p++) {
      const std::uint8_t* part = codes.Next();
      TileDot(q, part);
      if constexpr (GROUP == 16) {
        TileStore(sums[g % 2].of[0]);
        TileZero();
        TileDot(q, part + 512);
      }
      q += static_cast<std::ptrdiff_t>(rows) * 32;
    }
    TileStore(sums[g % 2].of[GROUP == 16 ? 1 : 0]);
    if (g > 0) Add<N, SYM, GROUP>(sums[(g - 1) % 2], x, cell0, rows, g - 1, header, acc);
  }
  Add<N, SYM, GROUP>(sums[(steps - 1) % 2], x, cell0, rows, steps - 1, header, acc);
  StoreRows(acc, rows, out, ld);
}

template <int N, bool SYM, int GROUP>
HWY_NOINLINE void Tile(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile, float* out,
                       std::size_t ld, const Fetch& fetch) {
  const auto steps = static_cast<std::size_t>(w.depth() / w.input_form().group);
  const std::size_t fetch_step = fetch.share(steps * static_cast<std::size_t>(count));
  for (int b = 0; b < count; b++) {
    Block<N, SYM, GROUP>(w, w.block(first + b), x, tile, out + b * kLanes, ld, fetch.at + b * steps * fetch_step,
                         fetch_step);
  }
}

template <bool SYM, int GROUP>
HWY_INLINE ProductFunction PickRows(int rows) {
  return rows <= 12 ? Tile<12, SYM, GROUP> : Tile<16, SYM, GROUP>;
}

HWY_INLINE ProductFunction Pick(const PackedMatrix& w, int rows) {
  if constexpr (kBits >= 6) {
    if (w.group() == 16) return w.symmetric() ? PickRows<true, 16>(rows) : PickRows<false, 16>(rows);
  }
  if (w.group() > 32) return PickRows<false, 0>(rows);
  return w.symmetric() ? PickRows<true, 32>(rows) : PickRows<false, 32>(rows);
}

void Product(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile, float* out,
             std::size_t ld, const Fetch& fetch) {
  const int rows = x.tile_rows(tile);
  const ProductFunction product = rows <= kFewRows ? vnni::Pick(w, rows) : Pick(w, rows);
  product(w, x, first, count, tile, out, ld, fetch);
}
