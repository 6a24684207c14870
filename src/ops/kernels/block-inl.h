// Internal: blocks of an affine matrix (`lanes` output columns each) times a tile of R int8 rows. Included once per
// dot-product flavour inside HWY_NAMESPACE, hence no include guard; GALLEY_DOT = 0: vpmaddubsw, 1: vpdpbusd. kBits is
// the including file's.
//
// The integer part is exact, so its order is free; the float part adds group after group in the same order for
// every R: a row's result doesn't depend on how rows are tiled.

// Row C of a part's codes, 0 to 7: inputs 4C .. 4C+3 of 32, put together from nibbles and planes.
template <int C>
HWY_INLINE VU8 CodeRow(const std::uint8_t* HWY_RESTRICT w) {
  const hn::ScalableTag<std::uint8_t> du;
  const hn::ScalableTag<std::uint16_t> du16;
  constexpr std::size_t kBytes = kLanes * 4;
  if constexpr (kBits == 8) {
    return hn::Load(du, w + C * kBytes);
  } else {
    const auto nibbles = hn::BitCast(du16, hn::Load(du, w + C % 4 * kBytes));
    const auto low = hn::And(hn::BitCast(du, C < 4 ? nibbles : hn::ShiftRight<4>(nibbles)), hn::Set(du, 15));
    if constexpr (kBits == 4) {
      return low;
    } else {
      constexpr int kPlane = kBits == 5 ? 4 : 4 + C / 4, kBit = kBits == 5 ? C : C % 4 * 2;
      auto plane = hn::BitCast(du16, hn::Load(du, w + kPlane * kBytes));
      if constexpr (kBit < 4) plane = hn::ShiftLeft<4 - kBit>(plane);
      if constexpr (kBit > 4) plane = hn::ShiftRight<kBit - 4>(plane);
      return hn::Or(low, hn::And(hn::BitCast(du, plane), hn::Set(du, kBits == 5 ? 16 : 48)));
    }
  }
}

#if GALLEY_DOT == 1
template <int R, int C>
HWY_INLINE void AddRow(const std::uint8_t* HWY_RESTRICT w, const std::int8_t* HWY_RESTRICT q, VI* HWY_RESTRICT out) {
  const auto v = CodeRow<C>(w);
  for (int r = 0; r < R; r++) out[r] = Dot4(out[r], v, Broadcast4(q + r * 32 + C * 4));
}
#else
template <int R, int C, bool FIRST>
HWY_INLINE void AddRow(const std::uint8_t* HWY_RESTRICT w, const std::int8_t* HWY_RESTRICT q, VI16* HWY_RESTRICT out) {
  const auto v = CodeRow<C>(w);
  for (int r = 0; r < R; r++) {
    const auto p = Pairs(v, Broadcast4(q + r * 32 + C * 4));
    out[r] = FIRST ? p : hn::Add(out[r], p);
  }
}
#endif

// Sum over inputs 16H .. 16H+15 of a part, per column, for R rows.
template <int R, int H>
HWY_INLINE void Dot16(const std::uint8_t* HWY_RESTRICT w, const std::int8_t* HWY_RESTRICT q, VI* HWY_RESTRICT out) {
  constexpr int kRow = 4 * H;
#if GALLEY_DOT == 1
  for (int r = 0; r < R; r++) out[r] = hn::Zero(DI());
  AddRow<R, kRow>(w, q, out);
  AddRow<R, kRow + 1>(w, q, out);
  AddRow<R, kRow + 2>(w, q, out);
  AddRow<R, kRow + 3>(w, q, out);
#else
  const hn::ScalableTag<std::int16_t> d16;
  const auto one = hn::Set(d16, 1);
  VI16 sum[R];
  if constexpr (kBits <= 5) {  // at most 4 pairs * 2 * 31 * 127 = 31496: fits int16
    AddRow<R, kRow, true>(w, q, sum);
    AddRow<R, kRow + 1, false>(w, q, sum);
    AddRow<R, kRow + 2, false>(w, q, sum);
    AddRow<R, kRow + 3, false>(w, q, sum);
    for (int r = 0; r < R; r++) out[r] = Widen(sum[r], one);
  } else if constexpr (kBits == 6) {  // 2 pairs * 2 * 63 * 127 = 32004
    AddRow<R, kRow, true>(w, q, sum);
    AddRow<R, kRow + 1, false>(w, q, sum);
    for (int r = 0; r < R; r++) out[r] = Widen(sum[r], one);
    AddRow<R, kRow + 2, true>(w, q, sum);
    AddRow<R, kRow + 3, false>(w, q, sum);
    for (int r = 0; r < R; r++) out[r] = hn::Add(out[r], Widen(sum[r], one));
  } else {  // u8 * i8 pairs would saturate: split the byte into two exact nibble sums
    const hn::ScalableTag<std::uint8_t> du;
    const hn::ScalableTag<std::uint16_t> du16;
    const auto mask = hn::Set(du, 15);
    VI16 high[R];
    for (int c = 0; c < 4; c++) {
      const auto v = hn::Load(du, w + (kRow + c) * kLanes * 4);
      const auto lo = hn::And(v, mask);
      const auto hi = hn::And(hn::BitCast(du, hn::ShiftRight<4>(hn::BitCast(du16, v))), mask);
      for (int r = 0; r < R; r++) {
        const auto x = Broadcast4(q + r * 32 + (kRow + c) * 4);
        const auto p = Pairs(lo, x), h = Pairs(hi, x);
        sum[r] = c == 0 ? p : hn::Add(sum[r], p);
        high[r] = c == 0 ? h : hn::Add(high[r], h);
      }
    }
    for (int r = 0; r < R; r++) out[r] = hn::Add(Widen(sum[r], one), Widen(high[r], hn::Set(d16, 16)));
  }
#endif
}

// Sum over 32 inputs of u8 codes times i8 activations, per column, for R rows; symmetric: minus the codes' zero point.
template <int R, bool SYM>
HWY_INLINE void Dot32(const std::uint8_t* HWY_RESTRICT w, const std::int8_t* HWY_RESTRICT q,
                      const std::int32_t* HWY_RESTRICT neg, VI* HWY_RESTRICT out) {
  const DI di;
  const hn::ScalableTag<std::uint8_t> du;
  const hn::ScalableTag<std::uint16_t> du16;
  [[maybe_unused]] constexpr std::size_t kBytes = kLanes * 4;
  [[maybe_unused]] const auto mask = hn::Set(du, 15);
#if GALLEY_DOT == 1
  for (int r = 0; r < R; r++) out[r] = SYM ? hn::ShiftLeft<kBits - 1>(hn::Set(di, neg[r])) : hn::Zero(di);
  if constexpr (kBits == 5 || kBits == 6) {
    AddRow<R, 0>(w, q, out);
    AddRow<R, 1>(w, q, out);
    AddRow<R, 2>(w, q, out);
    AddRow<R, 3>(w, q, out);
    AddRow<R, 4>(w, q, out);
    AddRow<R, 5>(w, q, out);
    AddRow<R, 6>(w, q, out);
    AddRow<R, 7>(w, q, out);
    return;
  }
  for (int c = 0; c < kBits; c++) {
    const auto v = hn::Load(du, w + c * kBytes);
    if constexpr (kBits == 4) {
      const auto lo = hn::And(v, mask);
      const auto hi = hn::And(hn::BitCast(du, hn::ShiftRight<4>(hn::BitCast(du16, v))), mask);
      for (int r = 0; r < R; r++) out[r] = Dot4(out[r], lo, Broadcast4(q + r * 32 + c * 4));
      for (int r = 0; r < R; r++) out[r] = Dot4(out[r], hi, Broadcast4(q + r * 32 + (c + 4) * 4));
    } else {
      for (int r = 0; r < R; r++) out[r] = Dot4(out[r], v, Broadcast4(q + r * 32 + c * 4));
    }
  }
#else
  if constexpr (kBits == 5 || kBits == 6) {
    VI more[R];
    Dot16<R, 0>(w, q, out);
    Dot16<R, 1>(w, q, more);
    for (int r = 0; r < R; r++) {
      out[r] = hn::Add(out[r], more[r]);
      if constexpr (SYM) out[r] = hn::Add(out[r], hn::ShiftLeft<kBits - 1>(hn::Set(di, neg[r])));
    }
    return;
  }
  VI16 lo16[R];
  [[maybe_unused]] VI16 hi16[kBits == 8 ? R : 1];
  for (int c = 0; c < kBits; c++) {
    const auto v = hn::Load(du, w + c * kBytes);
    const auto lo = hn::And(v, mask);
    const auto hi = hn::And(hn::BitCast(du, hn::ShiftRight<4>(hn::BitCast(du16, v))), mask);
    if constexpr (kBits == 4) {  // at most 8 pairs * 2 * 15 * 127 = 30480: fits int16
      for (int r = 0; r < R; r++) {
        const auto p = Pairs(lo, Broadcast4(q + r * 32 + c * 4));
        lo16[r] = c == 0 ? p : hn::Add(lo16[r], p);
      }
      for (int r = 0; r < R; r++) lo16[r] = hn::Add(lo16[r], Pairs(hi, Broadcast4(q + r * 32 + (c + 4) * 4)));
    } else {  // two exact nibble sums, as above
      for (int r = 0; r < R; r++) {
        const auto x = Broadcast4(q + r * 32 + c * 4);
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

// Walks a block's header, group after group.
template <bool SYM>
struct Scales {
  const std::uint8_t* at;
  ScaleKind kind;
  int per_run;   // groups that share the upper level
  int left = 0;  // of them
  VF upper = hn::Zero(DF()), upper_bias = hn::Zero(DF());
  VF scale = hn::Zero(DF()), bias = hn::Zero(DF());

  HWY_INLINE VF Half() {
    const DF df;
    const hn::Rebind<hwy::float16_t, DF> dh;
    const VF v = hn::PromoteTo(df, hn::Load(dh, reinterpret_cast<const hwy::float16_t*>(at)));
    at += kLanes * 2;
    return v;
  }
  HWY_INLINE VF Single() {
    const VF v = hn::Load(DF(), reinterpret_cast<const float*>(at));
    at += kLanes * 4;
    return v;
  }
  HWY_INLINE VF Small() {
    const hn::Rebind<std::int8_t, DI> d8;
    const VI v = hn::PromoteTo(DI(), hn::Load(d8, reinterpret_cast<const std::int8_t*>(at)));
    at += kLanes;
    return hn::ConvertTo(DF(), v);
  }
  HWY_INLINE void Next() {
    switch (kind) {
      case ScaleKind::half:
        scale = Half();
        if constexpr (!SYM) bias = Half();
        return;
      case ScaleKind::single:
        scale = Single();
        if constexpr (!SYM) bias = Single();
        return;
      case ScaleKind::two_level:
        if (left == 0) {
          left = per_run;
          upper = Half();
          if constexpr (!SYM) upper_bias = Half();
        }
        --left;
        scale = hn::Mul(upper, Small());
        if constexpr (!SYM) bias = hn::Mul(upper_bias, Small());
        return;
    }
  }
};

// Half a step of activations times a group of 16. neg16: minus the sum of their codes.
template <int R, bool SYM>
HWY_INLINE void Accumulate16(const VI* HWY_RESTRICT dot, const float* HWY_RESTRICT scale,
                             const std::int32_t* HWY_RESTRICT neg16, const Scales<SYM>& weights, VF* HWY_RESTRICT acc) {
  const DF df;
  for (int r = 0; r < R; r++) {
    const VI d = SYM ? hn::Add(dot[r], hn::ShiftLeft<kBits - 1>(hn::Set(DI(), neg16[r]))) : dot[r];
    acc[r] = hn::MulAdd(hn::ConvertTo(df, d), hn::Mul(weights.scale, hn::Set(df, scale[r])), acc[r]);
    if constexpr (!SYM) {
      const float sum = scale[r] * -static_cast<float>(neg16[r]);
      acc[r] = hn::MulAdd(weights.bias, hn::Set(df, sum), acc[r]);
    }
  }
}

// GROUP: 16, 32, or 0 for a multiple of 32 (never symmetric). Activations have a scale for each 32 inputs then, or for
// each group if that is larger.
template <int R, bool SYM, int GROUP>
HWY_INLINE void Block(const PackedMatrix& w, const std::uint8_t* HWY_RESTRICT block, const std::int8_t* HWY_RESTRICT q,
                      const float* HWY_RESTRICT scale, const float* HWY_RESTRICT sum,
                      const std::int32_t* HWY_RESTRICT neg, const std::int32_t* HWY_RESTRICT neg16,
                      float* HWY_RESTRICT out, std::size_t ld, const char* fetch, std::size_t fetch_step) {
  const DF df;
  const int steps = w.depth() / w.input_form().group;
  [[maybe_unused]] const int parts = w.group() / 32;
  Scales<SYM> header{block, w.scale_kind(), w.groups_per_run()};
  const std::uint8_t* codes = block + w.header_bytes();
  constexpr std::size_t kPart = static_cast<std::size_t>(kLanes) * 4 * kBits;
  VF acc[R];
  for (int r = 0; r < R; r++) acc[r] = hn::Zero(df);
  for (int g = 0; g < steps; g++) {
    for (std::size_t o = 0; o < fetch_step; o += 64) __builtin_prefetch(fetch + o, 0, kToL2);
    fetch += fetch_step;
    if constexpr (GROUP == 16) {
      VI dot[R];
      Dot16<R, 0>(codes, q, dot);
      header.Next();
      Accumulate16<R, SYM>(dot, scale + g * R, neg16 + 2 * g * R, header, acc);
      Dot16<R, 1>(codes, q, dot);
      header.Next();
      Accumulate16<R, SYM>(dot, scale + g * R, neg16 + (2 * g + 1) * R, header, acc);
      codes += kPart;
      q += R * 32;
      continue;
    }
    VI dot[R];
    Dot32<R, SYM>(codes, q, neg + g * R, dot);
    codes += kPart;
    q += R * 32;
    if constexpr (GROUP == 0) {
      for (int part = 1; part < parts; part++) {
        VI more[R];
        Dot32<R, false>(codes, q, nullptr, more);
        for (int r = 0; r < R; r++) dot[r] = hn::Add(dot[r], more[r]);
        codes += kPart;
        q += R * 32;
      }
    }
    header.Next();
    for (int r = 0; r < R; r++) {
      acc[r] = hn::MulAdd(hn::ConvertTo(df, dot[r]), hn::Mul(header.scale, hn::Set(df, scale[g * R + r])), acc[r]);
      if constexpr (!SYM) acc[r] = hn::MulAdd(header.bias, hn::Set(df, sum[g * R + r]), acc[r]);
    }
  }
  for (int r = 0; r < R; r++) hn::Store(acc[r], df, out + r * ld);
}

template <int R, bool SYM, int GROUP>
HWY_NOINLINE void Tile(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile, float* out,
                       std::size_t ld, const Fetch& fetch) {
  const std::size_t row0 = static_cast<std::size_t>(tile) * x.tile();
  const std::size_t cell0 = row0 * x.groups();
  const auto steps = static_cast<std::size_t>(w.depth() / w.input_form().group);
  const std::size_t fetch_step = fetch.share(steps * static_cast<std::size_t>(count));
  for (int b = 0; b < count; b++) {
    Block<R, SYM, GROUP>(w, w.block(first + b), x.q() + row0 * x.k(), x.scale() + cell0, x.sum() + cell0,
                         x.neg() + cell0, GROUP == 16 ? x.neg16() + 2 * cell0 : nullptr, out + b * kLanes, ld,
                         fetch.at + b * steps * fetch_step, fetch_step);
  }
}

template <bool SYM, int GROUP>
HWY_INLINE ProductFunction PickRows(int rows) {
  static constexpr ProductFunction kRows[] = {
    Tile<1, SYM, GROUP>,
    Tile<2, SYM, GROUP>,
    Tile<3, SYM, GROUP>,
    Tile<4, SYM, GROUP>,
#if HWY_TARGET != HWY_AVX2
    Tile<5, SYM, GROUP>,
    Tile<6, SYM, GROUP>,
    Tile<7, SYM, GROUP>,
    Tile<8, SYM, GROUP>,
    Tile<9, SYM, GROUP>,
    Tile<10, SYM, GROUP>,
    Tile<11, SYM, GROUP>,
    Tile<12, SYM, GROUP>,
#endif
  };
  return kRows[rows - 1];
}

HWY_INLINE ProductFunction Pick(const PackedMatrix& w, int rows) {
  if constexpr (kBits >= 6) {  // where PackedMatrix stores groups of 16
    if (w.group() == 16) return w.symmetric() ? PickRows<true, 16>(rows) : PickRows<false, 16>(rows);
  }
  if (w.group() > 32) return PickRows<false, 0>(rows);
  return w.symmetric() ? PickRows<true, 32>(rows) : PickRows<false, 32>(rows);
}

void Product(const PackedMatrix& w, const Activations& x, std::size_t first, int count, int tile, float* out,
             std::size_t ld, const Fetch& fetch) {
  Pick(w, x.tile_rows(tile))(w, x, first, count, tile, out, ld, fetch);
}
