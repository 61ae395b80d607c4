// Writes the inputs that fuzzing starts from: for every codec what its own encoder makes, in a frame and alone.
// Run by hand (`make fuzz-seeds`) when a codec is added; the corpus keeps what it writes next to what fuzzing
// found.
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "messages/announcement.h"
#include "pipeline/slot_file_header.h"
#include "target.h"
#include "transport/tcp/secure.h"
#include "transport/tcp/wire.h"
#include "wire/frame.h"
#include "wire/key_values.h"
#include "wire/layout.h"

namespace {

using namespace lowcomm;

constexpr const char* kCodecs[] = {
    "none",
    "minmax1:bucket=64",
    "minmax4:bucket=64",
    "minmax7:bucket=128,meta=bf16",
    "minmax8:bucket=512",
    "minmax4:bucket=64,nonfinite=poison",
    "qsgd3:bucket=64",
    "lattice2:bucket=64",
    "sym4:bucket=64",
    "sym2:bucket=512,range=l2",
    "mid1:bucket=64",
    "sign1:bucket=64",
    "minmax8:bucket=tensor",
    "sym4:axis=channel,C=5",
    "qsgd4:bucket=512,meta=bf16,rotate=1",
    "gauss2",
    "gauss5:meta=fp32,gain=1.5",
    "fp16",
    "bf16",
    "topk",
    "topk:keep=0.01,values=qsgd4",
    "logbyte",
    "log9",
    "levels3:bucket=64",
    "levels6:bucket=512,meta=bf16",
    "minmax4:bucket=512,rotate=1,nonfinite=poison",
    "gauss4:nonfinite=poison",
    "sym2:axis=channel,C=5,nonfinite=poison",
    "fp16:nonfinite=poison",
    "topk:chunk=64,keep=8,values=sym2",
};
constexpr uint64_t kCounts[] = {0, 17, 530};

void write(const std::filesystem::path& folder, const std::string& name, const std::string& bytes) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder / name, std::ios::binary) << bytes;
}

std::string nameOf(std::string text, uint64_t count) {
  for (char& c : text) {
    if (c == ':' || c == ',' || c == '=') c = '-';
  }
  return text + "-" + std::to_string(count);
}

// Of an end with the secret of strangers.cpp.
std::string clientHello(const tcp::Identity& identity) {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) return "";
  const tcp::Fd theirs(fds[1]);
  const auto tls = std::make_shared<tcp::Tls>(tcp::Secret("b0pBTzHWtmPlKzjrLn7SdrZxdFKFEE9lbYgOxDY3xPI", "fuzz"));
  tls->dial(tcp::Fd(fds[0]), identity)->open();
  std::string bytes(tcp::kMostClientHelloBytes, 0);
  bytes.resize(std::max<ssize_t>(0, ::recv(theirs.get(), bytes.data(), bytes.size(), MSG_DONTWAIT)));
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: fuzz_seeds FOLDER\n");
    return 2;
  }
  const std::filesystem::path corpus = argv[1];
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (const char* text : kCodecs) {
    auto codec = makeCodec(CodecSpec::parse(text));
    if (needsTable(codec->spec())) codec = codec->with(fuzz::evenTable(codec->spec().bits));
    for (const uint64_t count : kCounts) {
      if (codec->spec().axis == Axis::channel && count % codec->spec().bucket != 0) continue;
      std::vector<float> x(count);
      for (float& v : x)
        v = normal(generator);
      if (codec->spec().nonfinite == Nonfinite::poison && count > 0) x[count / 2] = NAN;
      const size_t bytes = codec->encodedBytes(count, DType::float32);
      std::vector<std::byte> frame(kFrameHeaderBytes + bytes);
      codec->encode(std::span(frame).subspan(kFrameHeaderBytes), x.data(), DType::float32, 0, count, {});
      FrameHeader header;
      header.codec = codec->spec().id;
      header.bits = codec->spec().bits;
      header.bucket = codec->spec().bucket;
      header.flags = frameFlags(codec->spec());
      header.dtype = DType::float32;
      header.elements = count;
      header.payload_bytes = static_cast<uint32_t>(bytes);
      sealFrame(frame, header);
      const std::string all(reinterpret_cast<const char*>(frame.data()), frame.size());
      const std::string name = nameOf(text, count);
      if (count != 530) write(corpus / "frame", name, all);
      // Of one size also to be decoded to a 16-bit type, for which a payload is the same except for none's.
      const bool narrow = count == 17 || codec->spec().axis == Axis::channel;
      for (const DType dtype : {DType::float32, narrow ? DType::bfloat16 : DType::float32}) {
        std::string input(1, static_cast<char>(std::string(text).size()));
        input += text;
        input += {static_cast<char>(dtype), static_cast<char>(count & 255), static_cast<char>(count >> 8)};
        write(corpus / "decode", name + (dtype == DType::float32 ? "" : "-bfloat16"),
              input + all.substr(kFrameHeaderBytes));
      }
    }
    write(corpus / "text", nameOf(text, 0), CodecSpec::parse(text).str());
  }
  const Layout layout({{0, 100, CodecSpec::parse("minmax4:bucket=64")}, {100, 28, {}}});
  write(corpus / "text", "layout", layout.text());
  write(corpus / "text", "hello", KeyValues{{{"op", "all_gather"}, {"policy", "a\\b\nc"}}}.text());
  const std::string samples = "3@0,4@7,18446744073709551615@-";
  const KeyValues expected{
      {{"dtype", "bfloat16"}, {"elements", "48"}, {"samples", samples}, {"memory", "float16"}, {"codec", "gauss2"}}};
  write(corpus / "text", "announcement", Announcement{{MessageFlow::Kind::channel, 3}, 1, {}, expected}.text());
  write(corpus / "text", "announcement-tag",
        Announcement{{MessageFlow::Kind::tag, 3}, 1, kFirstMessageTag, expected}.text());
  write(corpus / "text", "withdrawal", Withdrawal{7, 2, "stage 1: micro-batch 3: a NaN\nand more"}.text());
  const auto header = bytesOf({72, 24, 144, "float16", "0.0.sent", "a run"}, "");
  std::string hello(tcp::kHelloBytes, 0), stream(1, 63);
  const auto bytesIn = [](std::string& text, size_t at, size_t size) {
    return std::as_writable_bytes(std::span(text).subspan(at, size));
  };
  tcp::write(tcp::Hello{.from = 1, .channel = 2, .received = 77},
             bytesIn(hello, 0, hello.size()).first<tcp::kHelloBytes>());
  write(corpus / "tcp", "hello", hello);
  for (const tcp::Record& record :
       {tcp::Record{tcp::Record::Kind::message, 1, 0, 90}, tcp::Record{tcp::Record::Kind::delivered, 0, 0, 0},
        tcp::Record{tcp::Record::Kind::message, 5, 1, 40}, tcp::Record{tcp::Record::Kind::message, 1, 2, 0},
        tcp::Record{tcp::Record::Kind::message, 1, 3, 5}}) {
    const size_t at = stream.size();
    stream.resize(at + tcp::kRecordHeaderBytes + record.bytes, 'x');
    tcp::write(record, bytesIn(stream, at, tcp::kRecordHeaderBytes).first<tcp::kRecordHeaderBytes>());
  }
  write(corpus / "tcp", "stream", stream);
  std::string identity(tcp::kIdentityBytes, 0);
  const tcp::Identity named{.from = 1, .channel = 2, .incarnation = 88, .peer_incarnation = 77};
  tcp::write(named, bytesIn(identity, 0, identity.size()).first<tcp::kIdentityBytes>());
  write(corpus / "strangers", "identity", identity);
  // Acts of endpoint.cpp: a stream that pipelines messages, is answered and closes; one that claims sizes; two that are
  // relayed; hellos whose connections close at once.
  using namespace std::string_literals;
  const std::string code(32, 0);
  write(corpus / "endpoint", "stream",
        "\2\3\1\3\0\0\x1d\4\0\0\0\5\5\5hello\3\0\0\x18\4\0\1\0\0\6\3\0\0\x18\4\1\0\0\0\0\7"s);
  write(corpus / "endpoint", "claims", "\2\3\2\3\4\0\x0f\xff\xff\4\x08\0\0\0\0\0\3\xff\xff\xff\4\2\1\1\0\4\4\1\0\1"s);
  write(corpus / "endpoint", "relayed", "\2\x44\0\5\x20"s + code + "\x0a\4\1\x0d\x20"s + code + "\5\3abc\x0d\2de\0"s);
  write(corpus / "endpoint", "hang_up", "\2\3\3\0\2\3\4\0\2\3\5\1\2\1\6\0"s);
  // A ClientHello is another one each time: the first is kept.
  if (!tcp::tlsLibrary().empty() && !std::filesystem::exists(corpus / "strangers" / "client_hello"))
    write(corpus / "strangers", "client_hello", clientHello(named));
  write(corpus / "slot_file", "header", {reinterpret_cast<const char*>(header.data()), header.size()});
  return 0;
}
