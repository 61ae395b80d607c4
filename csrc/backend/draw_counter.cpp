#include "backend/draw_counter.h"

#include "base/hashes.h"

namespace lowcomm {

uint64_t DrawCounter::key() const {
  // splitmix64: neighbouring seeds and names give unrelated keys.
  uint64_t key = group_.settings().seed + fnv1a(group_.name()) + 0x9e3779b97f4a7c15ull;
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9ull;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebull;
  return key ^ (key >> 31);
}

Draws DrawCounter::ofStep(uint32_t step) const {
  return {key(), streamOf(group_.globalRank(), 0), step};
}

}  // namespace lowcomm
