// Internal: blocks of an affine matrix (`lanes` output columns each) times a tile of R int8 rows. Included once per
// dot-product flavour inside HWY_NAMESPACE, hence no include guard; GALLEY_DOT = 0: vpmaddubsw, 1: vpdpbusd. kBits is
// the including file's.
//
// The integer part is exact, so its order is free; the float part adds group after group in the same order for
// every R: a row's result doesn't depend on how rows are tiled.

// Sum over 32 inputs of u8 codes times i8 activations, per column, for R rows; symmetric: minus the codes' zero point.
template <int R, bool SYM>
HWY_INLINE void Dot32(const std::uint8_t* HWY_RESTRICT w, const std::int8_t* HWY_RESTRICT q,
                      const std::int32_t* HWY_RESTRICT neg, VI* HWY_RESTRICT out) {
  const DI di;
  const hn::ScalableTag<std::uint8_t> du;
  const hn::ScalableTag<std::uint16_t> du16;
  constexpr std::size_t kBytes = kLanes * 4;
  [[maybe_unused]] const auto mask = hn::Set(du, 15);
#if GALLEY_DOT == 1
  for (int r = 0; r < R; r++) out[r] = SYM ? hn::ShiftLeft<kBits - 1>(hn::Set(di, neg[r])) : hn::Zero(di);
  for (int c = 0; c < kBits; c++) {
    const auto v = hn::Load(du, w + c * kBytes);
    if constexpr (kBits == 4) {
      const auto lo = hn::And(v, mask);
      const auto hi = hn::And(hn::BitCast(du, hn::ShiftRight<4>(hn::BitCast(du16, v))), mask);
      for (int r = 0; r < R; r++) out[r] = Dot4(out[r], lo, Broadcast4(q + (c * R + r) * 4));
      for (int r = 0; r < R; r++) out[r] = Dot4(out[r], hi, Broadcast4(q + ((c + 4) * R + r) * 4));
    } else {
      for (int r = 0; r < R; r++) out[r] = Dot4(out[r], v, Broadcast4(q + (c * R + r) * 4));
    }
  }
#else
  VI16 lo16[R];
  [[maybe_unused]] VI16 hi16[kBits == 8 ? R : 1];
  for (int c = 0; c < kBits; c++) {
    const auto v = hn::Load(du, w + c * kBytes);
    const auto lo = hn::And(v, mask);
    const auto hi = hn::And(hn::BitCast(du, hn::ShiftRight<4>(hn::BitCast(du16, v))), mask);
    if constexpr (kBits == 4) {  // at most 8 pairs * 2 * 15 * 127 = 30480: fits int16
      for (int r = 0; r < R; r++) {
        const auto p = Pairs(lo, Broadcast4(q + (c * R + r) * 4));
        lo16[r] = c == 0 ? p : hn::Add(lo16[r], p);
      }
      for (int r = 0; r < R; r++) lo16[r] = hn::Add(lo16[r], Pairs(hi, Broadcast4(q + ((c + 4) * R + r) * 4)));
    } else {  // u8 * i8 pairs would saturate: split the byte into two exact nibble sums
      for (int r = 0; r < R; r++) {
        const auto x = Broadcast4(q + (c * R + r) * 4);
        const auto p = Pairs(lo, x), h = Pairs(hi, x);
        lo16[r] = c == 0 ? p : hn::Add(lo16[r], p);
        hi16[r] = c == 0 ? h : hn::Add(hi16[r], h);
      }
    }
  }
  const hn::ScalableTag<std::int16_t> d16;
  for (int r = 0; r < R; r++) {
    VI t = Widen(lo16[r], hn::Set(d16, 1));
    if constexpr (kBits == 8) t = hn::Add(t, Widen(hi16[r], hn::Set(d16, 16)));
    out[r] = SYM ? hn::Add(t, hn::ShiftLeft<kBits - 1>(hn::Set(di, neg[r]))) : t;
  }
#endif
}

HWY_INLINE VF LoadScale(const std::uint8_t* p, bool half) {
  const DF df;
  const hn::Rebind<hwy::float16_t, DF> dh;
  return half ? hn::PromoteTo(df, hn::Load(dh, reinterpret_cast<const hwy::float16_t*>(p)))
              : hn::Load(df, reinterpret_cast<const float*>(p));
}

// WIDE: groups of more than 32 (never symmetric).
template <int R, bool SYM, bool WIDE>
HWY_INLINE void Block(const PackedMatrix& w, const std::uint8_t* HWY_RESTRICT block, const std::int8_t* HWY_RESTRICT q,
                      const float* HWY_RESTRICT scale, const float* HWY_RESTRICT sum,
                      const std::int32_t* HWY_RESTRICT neg, float* HWY_RESTRICT out, std::size_t ld,
                      const char* prefetch) {
  const DF df;
  const int groups = w.groups(), parts = w.group() / 32;
  const bool half = w.half_scales();
  const std::size_t header_step = static_cast<std::size_t>(kLanes) * (half ? 2 : 4);
  const std::uint8_t* header = block;
  const std::uint8_t* codes = block + w.header_bytes();
  constexpr std::size_t kPart = static_cast<std::size_t>(kLanes) * 4 * kBits;
  const std::size_t fetch_step = w.block_bytes() / static_cast<std::size_t>(groups);
  VF acc[R];
  for (int r = 0; r < R; r++) acc[r] = hn::Zero(df);
  for (int g = 0; g < groups; g++) {
    if (prefetch != nullptr) {
      for (std::size_t o = 0; o < fetch_step; o += 64) __builtin_prefetch(prefetch + o, 0, kToL2);
      prefetch += fetch_step;
    }
    VI dot[R];
    Dot32<R, SYM>(codes, q, neg + g * R, dot);
    codes += kPart;
    q += R * 32;
    if constexpr (WIDE) {
      for (int part = 1; part < parts; part++) {
        VI more[R];
        Dot32<R, false>(codes, q, nullptr, more);
        for (int r = 0; r < R; r++) dot[r] = hn::Add(dot[r], more[r]);
        codes += kPart;
        q += R * 32;
      }
    }
    const VF sc = LoadScale(header, half);
    header += header_step;
    VF bi = hn::Zero(df);
    if constexpr (!SYM) {
      bi = LoadScale(header, half);
      header += header_step;
    }
    for (int r = 0; r < R; r++) {
      acc[r] = hn::MulAdd(hn::ConvertTo(df, dot[r]), hn::Mul(sc, hn::Set(df, scale[g * R + r])), acc[r]);
      if constexpr (!SYM) acc[r] = hn::MulAdd(bi, hn::Set(df, sum[g * R + r]), acc[r]);
    }
  }
  for (int r = 0; r < R; r++) hn::Store(acc[r], df, out + r * ld);
}

template <int R, bool SYM, bool WIDE>
HWY_NOINLINE void Tile(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile, float* out,
                       std::size_t ld, const char* prefetch) {
  const std::size_t row0 = static_cast<std::size_t>(tile) * x.tile();
  const std::size_t cell0 = row0 * x.groups();
  for (int b = 0; b < count; b++) {
    Block<R, SYM, WIDE>(w, w.block(first + b), x.q() + row0 * x.k(), x.scale() + cell0, x.sum() + cell0,
                        x.neg() + cell0, out + b * kLanes, ld,
                        prefetch != nullptr ? prefetch + b * w.block_bytes() : nullptr);
  }
}

template <bool SYM, bool WIDE>
HWY_INLINE ProductFunction PickRows(int rows) {
  static constexpr ProductFunction kRows[] = {
    Tile<1, SYM, WIDE>,
    Tile<2, SYM, WIDE>,
    Tile<3, SYM, WIDE>,
    Tile<4, SYM, WIDE>,
#if HWY_TARGET != HWY_AVX2
    Tile<5, SYM, WIDE>,
    Tile<6, SYM, WIDE>,
    Tile<7, SYM, WIDE>,
    Tile<8, SYM, WIDE>,
    Tile<9, SYM, WIDE>,
    Tile<10, SYM, WIDE>,
    Tile<11, SYM, WIDE>,
    Tile<12, SYM, WIDE>,
#endif
  };
  return kRows[rows - 1];
}

void Product(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile, float* out,
             std::size_t ld, const char* prefetch) {
  const int rows = x.tile_rows(tile);
  const ProductFunction f = w.group() > 32  ? PickRows<false, true>(rows)
                            : w.symmetric() ? PickRows<true, false>(rows)
                                            : PickRows<false, false>(rows);
  f(w, x, first, count, tile, out, ld, prefetch);
}
