// The texts that ranks exchange: hellos and descriptions, layouts, codecs, announcements of receives and withdrawals.
// An accepted text has one spelling.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "codec/spec.h"
#include "messages/announcement.h"
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
  refusing([&] {
    const Announcement announcement = Announcement::parse(text);
    const Announcement again = Announcement::parse(announcement.text());
    fuzz::require(again.text() == announcement.text() && again.frames == announcement.frames);
  });
  refusing([&] {
    const Withdrawal withdrawal = Withdrawal::parse(text);
    const Withdrawal again = Withdrawal::parse(withdrawal.text());
    fuzz::require(again.block == withdrawal.block && again.period == withdrawal.period && again.why == withdrawal.why);
  });
  return 0;
}
