// The texts that ranks exchange: hellos and descriptions, layouts, codecs. An accepted text has one spelling.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "codec/spec.h"
#include "target.h"
#include "wire/key_values.h"
#include "wire/layout.h"

namespace {

// Calls f, which may refuse the bytes.
template <typename F>
void refusing(F&& f) {
  try {
    f();
  } catch (const lowcomm::ValueError&) {
  } catch (const lowcomm::WireError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lowcomm;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  refusing([&] {
    const KeyValues hello = KeyValues::parse(text);
    fuzz::require(KeyValues::parse(hello.text()).fields == hello.fields);
  });
  refusing([&] {
    const Layout layout = Layout::parse(text);
    const Layout again = Layout::parse(layout.text());
    fuzz::require(again.segments() == layout.segments() && again.hash() == layout.hash());
  });
  refusing([&] {
    const CodecSpec spec = CodecSpec::parse(text);
    fuzz::require(CodecSpec::parse(spec.str()) == spec);
  });
  return 0;
}
