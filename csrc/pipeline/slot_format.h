#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "codec/codec.h"

namespace lowcomm {

// How a slot holds one sample's elements: in a float type, or as the payload of a codec. A coded slot is read and
// written as float32, for AQ-SGD's memory of few bits (Wang et al., Fine-tuning Language Models over Slow Networks
// using Activation Compression with Guarantees, NeurIPS 2022, section 3.1). Thread-safe.
class SlotFormat {
 public:
  // TypeError unless `dtype` is float32, float16 or bfloat16; ValueError for 0 elements.
  SlotFormat(uint64_t elements, DType dtype);

  // ValueError for 0 elements, for a codec that does not take so many, and for `none` and codecs with a level table.
  SlotFormat(uint64_t elements, const CodecSpec& codec);

  // The same from a user's text: "fp32", "fp16" or "bf16", or a codec. `channels` is the last dimension of the tensor.
  static SlotFormat parse(const std::string& text, uint64_t elements, uint64_t channels);

  uint64_t elements() const { return elements_; }
  size_t slotBytes() const { return slot_bytes_; }

  // The part of parse() that depends on the text alone.
  static void check(const std::string& text);

  // The dtype's name, or the codec's text: two sides with equal names hold equal bits after equal messages.
  std::string name() const;

  // Whether slots hold codes. Elements are then worked on as float32, else in the slot itself.
  bool coded() const { return codec_ != nullptr; }
  DType dtype() const { return dtype_; }

  // Coded slots only: all elements of one. ValueError for bytes that no encoder has written.
  void decode(const std::byte* slot, float* elements) const;

  // The reverse. The draws of a stochastic codec are functions of `sample` and `version` alone, so that both sides of a
  // channel have them in common. `elements` is scratch afterwards: a number that is not finite becomes 0, and one that
  // the codec refuses for its size is held to the largest that it takes.
  void encode(float* elements, std::byte* slot, uint64_t sample, uint32_t version) const;

 private:
  uint64_t elements_;
  DType dtype_;
  std::shared_ptr<const Codec> codec_;  // null: a float type
  size_t slot_bytes_;
};

}  // namespace lowcomm
