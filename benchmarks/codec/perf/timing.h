#pragma once

// Memory, clock and gates that all rows share.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace lowcomm {

struct Options {
  size_t mib = 256;
  int repetitions = 9;
  std::string form, only, json;
};

struct Gate {
  std::string name;
  double value, bound;
  bool pass() const { return value >= bound; }
};

// A floor of one instruction set, by name; 0: none known.
struct Floor {
  double avx2, avx512;
  double of(const std::string& form) const { return form == "avx2" ? avx2 : form == "avx512" ? avx512 : 0; }
};

constexpr size_t kPiece = size_t{1} << 22;  // elements of one timed call: 16 MiB of fp32

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class T>
std::unique_ptr<T[], decltype(&std::free)> allocate(size_t count) {
  void* p = std::aligned_alloc(4096, (count * sizeof(T) + 4095) / 4096 * 4096);
  if (!p) throw std::bad_alloc();
  std::memset(p, 0, count * sizeof(T));  // no page faults while the clock runs
  return {static_cast<T*>(p), &std::free};
}

template <class T>
using Buffer = decltype(allocate<T>(0));

// The smallest time of every piece over all passes: a shared machine interrupts a long pass nearly always, a piece
// seldom.
class Fastest {
 public:
  explicit Fastest(size_t pieces) : best_(pieces, INFINITY) {}

  template <class F>
  void pass(F&& piece) {
    for (size_t i = 0; i < best_.size(); ++i) {
      const double start = now();
      piece(i);
      best_[i] = std::min(best_[i], now() - start);
    }
  }

  double seconds() const {
    double sum = 0;
    for (double s : best_)
      sum += s;
    return sum;
  }

 private:
  std::vector<double> best_;
};

}  // namespace lowcomm
