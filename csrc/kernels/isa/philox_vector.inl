// Philox4x32-10 (philox.h) on the vectors of lanes.inl, included before this file.
//
// Even and odd counters run side by side in 64-bit lanes, since only 32 x 32 -> 64 multiplies exist. Only the low
// halves of those lanes matter: what stands above them is never multiplied and is dropped at the end.

namespace lowcomm {
namespace {

// The numbers that calls with the same key and high half of the counter share: the keys of the later rounds, and the
// first three rounds as far as they do not depend on counter word 0, the only one that differs.
struct PhiloxConstants {
  Quads round0, round1_low, round1_high, round2;
  Quads key0[kPhiloxRounds], key1[kPhiloxRounds];  // from round 2 and from round 3
};

LOWCOMM_INLINE PhiloxConstants philoxConstants(uint64_t counter, const PhiloxKey& key) {
  const uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  const auto key1 = [&](uint32_t round) { return k1 + round * kPhiloxWeyl1; };
  const uint64_t of_stream = uint64_t{kPhiloxMul1} * key.stream;
  const uint32_t word0 = static_cast<uint32_t>(of_stream >> 32) ^ static_cast<uint32_t>(counter >> 32) ^ k0;
  const uint64_t of_word0 = uint64_t{kPhiloxMul0} * word0;
  const auto splatQuad = [](uint32_t x) { return Quads{} + uint64_t{x}; };
  PhiloxConstants c;
  c.round0 = splatQuad(key.step ^ k1);
  c.round1_low = splatQuad(static_cast<uint32_t>(of_stream) ^ (k0 + kPhiloxWeyl0));
  c.round1_high = splatQuad(static_cast<uint32_t>(of_word0 >> 32) ^ key1(1));
  c.round2 = splatQuad(static_cast<uint32_t>(of_word0) ^ key1(2));
  for (uint32_t round = 2; round < kPhiloxRounds; ++round) {
    c.key0[round] = splatQuad(k0 + round * kPhiloxWeyl0);
    c.key1[round] = splatQuad(key1(round));
  }
  return c;
}

// The outputs of counters `counter` ... counter + kLanes - 1; `counter` is a multiple of kLanes and has the high half
// that c was made for.
LOWCOMM_INLINE void philoxOfBlock(Words (&out)[4], const PhiloxConstants& c, uint64_t counter) {
  const Quads mul0 = Quads{} + uint64_t{kPhiloxMul0}, mul1 = Quads{} + uint64_t{kPhiloxMul1};
  // Round by round, so that the two chains of dependent products stand side by side.
  Quads word[2][4];
  for (uint32_t odd = 0; odd < 2; ++odd) {
    Quads place{};
    for (uint32_t i = 0; i < kLanes / 2; ++i)
      place[i] = 2 * i + odd;
    const Quads first = multiplyEven(place + (counter & 0xffffffffu), mul0);
    word[odd][2] = (first >> 32) ^ c.round0;
    word[odd][3] = first ^ c.round1_high;
  }
  for (uint32_t odd = 0; odd < 2; ++odd) {
    const Quads second = multiplyEven(word[odd][2], mul1);
    word[odd][0] = (second >> 32) ^ c.round1_low;
    word[odd][1] = second;
    word[odd][2] = word[odd][3];
    word[odd][3] = Quads{};
  }
  for (int round = 2; round < kPhiloxRounds; ++round) {
    for (uint32_t odd = 0; odd < 2; ++odd) {
      Quads(&w)[4] = word[odd];
      const Quads p0 = multiplyEven(w[0], mul0), p1 = multiplyEven(w[2], mul1);
      w[0] = (p1 >> 32) ^ w[1] ^ c.key0[round];
      w[2] = round == 2 ? (p0 >> 32) ^ c.round2 : (p0 >> 32) ^ w[3] ^ c.key1[round];
      w[1] = p1;
      w[3] = p0;
    }
  }
  for (int i = 0; i < 4; ++i)
    out[i] = evenOdd(word[0][i], word[1][i]);
}

// philoxLanes() for a single call outside of a loop.
LOWCOMM_INLINE void philoxLanes(Words (&out)[4], uint64_t counter, const PhiloxKey& key) {
  philoxOfBlock(out, philoxConstants(counter, key), counter);
}

}  // namespace
}  // namespace lowcomm
