// The ways of pieces inside a site: one all_to_all over its ranks, exact.
#include <c10/core/GradMode.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "collective/collectives.h"
#include "diloco/site_model.h"
#include "tensor/host_parameters.h"
#include "wire/layout.h"

namespace lowcomm {
namespace {

constexpr int64_t kAligned = 16;  // bytes: segments are copied as elements of any type

// Where the segments of one pair of ranks stand in the bytes between them.
class Parcel {
 public:
  // Room for a segment; returns where it begins.
  int64_t add(int64_t bytes) {
    const int64_t at = bytes_;
    bytes_ += (bytes + kAligned - 1) / kAligned * kAligned;
    return at;
  }

  int64_t bytes() const { return bytes_; }
  void allocate() { buffer_ = at::empty({bytes_}, at::kByte); }
  void* data() const { return bytes_ == 0 ? nullptr : buffer_.mutable_data_ptr(); }

  at::Tensor view(int64_t at, const at::Tensor& like) const {
    const auto bytes = static_cast<int64_t>(like.numel() * like.element_size());
    return buffer_.narrow(0, at, bytes).view(like.scalar_type()).view(like.sizes());
  }

 private:
  int64_t bytes_ = 0;
  at::Tensor buffer_;
};

// A tensor by rows, also where it has no dimension.
at::Tensor byRows(const at::Tensor& tensor) {
  return tensor.dim() == 0 ? tensor.view({1}) : tensor;
}

}  // namespace

at::Tensor SiteModel::atHolder(const Segment& segment, const at::Tensor& parameter) const {
  const Holding& holding = held_[segment.holder][segment.holding];
  if (parameter.dim() == 0 || segment.end - segment.begin == parameter.size(0)) return parameter;
  return parameter.narrow(0, segment.begin - holding.offset[0], segment.end - segment.begin);
}

at::Tensor SiteModel::atCarrier(const Segment& segment, const at::Tensor& piece) const {
  const Holding& holding = held_[segment.holder][segment.holding];
  if (piece.dim() == 0) return piece;
  at::Tensor part = piece.narrow(0, segment.begin - pieces_[segment.piece].begin, segment.end - segment.begin);
  for (int64_t d = 1; d < part.dim(); ++d)
    part = part.narrow(d, holding.offset[d], holding.size[d]);
  return part;
}

// 1. Every rank packs its segments for each other rank. 2. All exchange their parcels. 3. Every rank unpacks.
void SiteModel::exchange(int64_t fragment, bool collects) {
  if (!moves_) return;
  const c10::NoGradGuard no_grad;
  // This fragment's parameters that this rank holds, in host memory: of a CUDA tensor its copy there.
  std::vector<at::Tensor> tensors;
  std::map<size_t, size_t> places;
  for (const Segment& segment : segments_) {
    if (pieces_[segment.piece].fragment != fragment || segment.holder != rank_) continue;
    if (places.try_emplace(segment.holding, tensors.size()).second)
      tensors.push_back(parameters_[segment.holding].tensor);
  }
  HostParameters hosts(std::move(tensors));

  struct Part {
    at::Tensor tensor;  // in host memory
    int64_t at;
  };
  const int size = ranks_->size();
  std::vector<Parcel> sent(size), got(size);
  std::vector<std::vector<Part>> packed(size), unpacked(size);
  for (const Segment& segment : segments_) {
    const Piece& piece = pieces_[segment.piece];
    if (piece.fragment != fragment || segment.direct || (collects && !segment.source)) continue;
    const int from = collects ? segment.holder : piece.carrier, to = collects ? piece.carrier : segment.holder;
    const auto local = [&](bool at_holder) {
      if (at_holder) return byRows(atHolder(segment, hosts.host(places.at(segment.holding))));
      const at::Tensor& own = piece.tensor;
      if (piece.parameter < 0) return byRows(atCarrier(segment, own));
      // A view of this rank's parameter: of its copy in host memory, too.
      const at::Tensor host = hosts.host(places.at(static_cast<size_t>(piece.parameter)));
      const Holding& holding = held_[rank_][static_cast<size_t>(piece.parameter)];
      const at::Tensor rows =
          host.dim() == 0 ? host : host.narrow(0, piece.begin - holding.offset[0], piece.end - piece.begin);
      return byRows(atCarrier(segment, rows));
    };
    const auto bytes = static_cast<int64_t>(segment.elements * c10::elementSize(piece.dtype));
    if (from == rank_) {
      const int64_t at = sent[to].add(bytes);
      packed[to].push_back({local(/*at_holder=*/collects), at});
    }
    if (to == rank_) {
      const int64_t at = got[from].add(bytes);
      unpacked[from].push_back({local(/*at_holder=*/!collects), at});
    }
  }

  AllToAllMessage message;
  message.dtype = DType::opaque;
  message.type_name = "bytes";
  for (int rank = 0; rank < size; ++rank) {
    sent[rank].allocate();
    got[rank].allocate();
    for (const Part& part : packed[rank])
      sent[rank].view(part.at, part.tensor).copy_(part.tensor);
    message.sent.push_back(Layout::single(sent[rank].bytes(), CodecSpec{}));
    message.got.push_back(Layout::single(got[rank].bytes(), CodecSpec{}));
    message.inputs.push_back(sent[rank].data());
    message.outputs.push_back(got[rank].data());
  }
  Ticket(*ranks_, collects ? "DiLoCoX: collect a site's parameters" : "DiLoCoX: spread a site's parameters", 1,
         [&](OpContext& op) { allToAll(op, message); })
      .wait();
  for (int rank = 0; rank < size; ++rank) {
    for (const Part& part : unpacked[rank])
      part.tensor.copy_(got[rank].view(part.at, part.tensor));
  }
  if (!collects) hosts.store();
}

}  // namespace lowcomm
