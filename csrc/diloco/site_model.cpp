// The holdings of a site's ranks, and the pieces and stripes that follow from them.
#include "diloco/site_model.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/hashes.h"
#include "collective/all_reduce.h"
#include "engine/op_queue.h"
#include "tensor/host_parameters.h"
#include "wire/key_values.h"

namespace lowcomm {
namespace {

// A parameter of more elements is cut: into pieces small enough for stripes to be about equally long, and large enough
// for the scales and frame headers of a piece to cost nothing.
constexpr int64_t kLeastPiece = 1 << 14, kPieces = 64;

// Where that many elements are whole rows, a piece is whole multiples of them, so that codes end with it: the last
// bucket of every other piece is padded.
constexpr int64_t kCodedTogether = 2048;

int64_t product(at::IntArrayRef shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

std::string joined(const std::vector<int64_t>& numbers) {
  std::string text;
  for (int64_t number : numbers)
    text += (text.empty() ? "" : ",") + std::to_string(number);
  return text.empty() ? "-" : text;
}

std::vector<int64_t> split(const std::string& text) {
  std::vector<int64_t> numbers;
  if (text == "-") return numbers;
  std::istringstream in(text);
  for (std::string one; std::getline(in, one, ',');)
    numbers.push_back(std::stoll(one));
  return numbers;
}

int64_t rowsOf(const std::vector<int64_t>& shape) {
  return shape.empty() ? 1 : shape[0];
}

// Whether a parameter is sent as factors of that rank, which a piece of it could not be.
bool isFactored(const std::vector<int64_t>& shape, int64_t rank) {
  const int64_t rows = rowsOf(shape), columns = rows == 0 ? 0 : product(shape) / rows;
  return rank > 0 && shape.size() >= 2 && rank < rows && rank < columns && isLowRank(rows, columns, rank);
}

// The rows of a piece of at most `most` elements.
int64_t rowsOfPiece(int64_t most, int64_t columns) {
  const int64_t step = std::max<int64_t>(1, most / columns), whole = std::lcm(kCodedTogether, columns) / columns;
  return step > whole ? step - step % whole : step;
}

std::string on(int rank) {
  return " on rank " + std::to_string(rank) + " of the site";
}

}  // namespace

std::string SiteModel::textOf(const std::vector<OuterParameter>& parameters, const std::string& error, bool checksums) {
  KeyValues text;
  if (!error.empty()) {
    text.fields.emplace_back("error", error);
    return text.text();
  }
  std::vector<at::Tensor> tensors;
  for (const OuterParameter& parameter : parameters)
    tensors.push_back(parameter.tensor);
  const HostParameters hosts(std::move(tensors));
  for (size_t i = 0; i < parameters.size(); ++i) {
    const OuterParameter& parameter = parameters[i];
    const std::vector<int64_t> size = parameter.tensor.sizes().vec();
    const std::vector<int64_t> whole = parameter.whole.empty() ? size : parameter.whole;
    const std::vector<int64_t> offset =
        parameter.whole.empty() ? std::vector<int64_t>(size.size(), 0) : parameter.offset;
    uint32_t sum = 0;
    if (checksums) {
      const at::Tensor host = hosts.host(i).contiguous();
      sum = crc32c(host.const_data_ptr(), host.nbytes());
    }
    text.fields.emplace_back("name" + std::to_string(i), parameter.name);
    text.fields.emplace_back("tensor" + std::to_string(i),
                             c10::str(static_cast<int>(parameter.tensor.scalar_type()), ' ', joined(whole), ' ',
                                      joined(offset), ' ', joined(size), ' ', sum));
  }
  return text.text();
}

std::vector<SiteModel::Holding> SiteModel::parsed(const std::string& text) {
  std::vector<Holding> holdings;
  for (const auto& [key, value] : KeyValues::parse(text).fields) {
    if (key.starts_with("name")) {
      holdings.emplace_back().name = value;
      continue;
    }
    Holding& holding = holdings.back();
    std::string whole, offset, size;
    int dtype = 0;
    std::istringstream(value) >> dtype >> whole >> offset >> size >> holding.checksum;
    holding.dtype = static_cast<at::ScalarType>(dtype);
    holding.whole = split(whole);
    holding.offset = split(offset);
    holding.size = split(size);
  }
  return holdings;
}

SiteModel::SiteModel(std::vector<OuterParameter> parameters, const OuterSite& site, int64_t fragments,
                     int64_t matrix_rank, bool same_values, const std::string& error)
    : parameters_(std::move(parameters)), ranks_(site.ranks), rank_(ranks_ ? ranks_->rank() : 0), parts_(site.parts) {
  std::vector<std::string> texts;
  if (ranks_) {
    texts = gatherTexts(textOf(parameters_, error, same_values), *ranks_, "DiLoCoX: what the ranks of a site hold");
  } else {
    texts = {textOf(parameters_, error, /*checksums=*/false)};
  }
  const int ranks = static_cast<int>(texts.size());
  if (!error.empty()) return;  // the caller throws its own
  if (parts_.empty()) {
    parts_.resize(ranks);
    std::iota(parts_.begin(), parts_.end(), 0);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const KeyValues text = KeyValues::parse(texts[rank]);
    if (!text.fields.empty() && text.fields[0].first == "error") {
      throw ValueError("DiLoCoX: expected every rank of the site to take part, got an error" + on(rank) + ": " +
                       text.fields[0].second);
    }
    held_.push_back(parsed(texts[rank]));
  }
  const int parts = 1 + *std::max_element(parts_.begin(), parts_.end());
  int next = 0;  // stripe
  for (int part = 0; part < parts; ++part) {
    std::vector<int> holders;
    for (int rank = 0; rank < ranks; ++rank) {
      if (parts_[rank] == part) holders.push_back(rank);
    }
    const int stripes = site.stripes.empty() ? static_cast<int>(holders.size()) : site.stripes.at(part);
    const int first = std::exchange(next, next + stripes);
    cut(part, holders, fragments, matrix_rank);
    deal(part, holders, first, stripes, fragments);
    if (part != parts_[rank_]) continue;
    first_stripe_ = first;
    part_stripes_ = stripes;
    const auto place = static_cast<int>(std::find(holders.begin(), holders.end(), rank_) - holders.begin());
    for (int stripe = place; stripe < stripes; stripe += static_cast<int>(holders.size()))
      stripes_.push_back(first + stripe);
  }
  chooseSources(same_values);
  place();
}

// The whole parameters of a part, in the order in which its ranks name them.
std::vector<SiteModel::Whole> SiteModel::wholes(const std::vector<int>& holders) const {
  std::vector<Whole> all;
  std::map<std::string, size_t> places;
  for (const int rank : holders) {
    for (size_t i = 0; i < held_[rank].size(); ++i) {
      const Holding& holding = held_[rank][i];
      const auto [place, is_new] = places.try_emplace(holding.name, all.size());
      if (is_new) all.push_back({holding.name, holding.dtype, holding.whole, {}});
      Whole& whole = all[place->second];
      if (holding.whole != whole.shape || holding.dtype != whole.dtype) {
        throw ValueError(c10::str("DiLoCoX: ", holding.name, ": expected ", whole.dtype, " of shape ",
                                  at::IntArrayRef(whole.shape), ", as", on(whole.holdings[0].first), ", got ",
                                  holding.dtype, " of shape ", at::IntArrayRef(holding.whole), on(rank)));
      }
      for (const auto& [other, j] : whole.holdings) {
        const Holding& before = held_[other][j];
        if (before.offset != holding.offset || before.size != holding.size) continue;
        if (other == rank)
          throw ValueError("DiLoCoX: expected different names, got '" + holding.name + "' twice" + on(rank));
        if (before.checksum != holding.checksum) {
          throw ValueError(c10::str("DiLoCoX: ", holding.name,
                                    ": expected replicas in a site to hold equal values, got checksum ",
                                    before.checksum, on(other), " and ", holding.checksum, on(rank)));
        }
      }
      whole.holdings.emplace_back(rank, i);
    }
  }
  return all;
}

// The pieces of a part, and the segments in which its ranks hold them.
void SiteModel::cut(int part, const std::vector<int>& holders, int64_t fragments, int64_t matrix_rank) {
  const std::vector<Whole> all = wholes(holders);
  if (all.empty()) return;  // no buffers
  int64_t total = 0;
  for (const Whole& whole : all)
    total += product(whole.shape);
  if (fragments > static_cast<int64_t>(all.size())) {
    throw ValueError(
        c10::str("DiLoCoX: fragments: expected at most the number of parameters, ", all.size(), ", got ", fragments));
  }
  const int64_t most = std::max(kLeastPiece, total / kPieces);
  const size_t first_piece = pieces_.size();
  for (const Whole& whole : all) {
    const int64_t rows = rowsOf(whole.shape), elements = product(whole.shape);
    const bool is_cut = elements > most && !isFactored(whole.shape, matrix_rank);
    const int64_t step = is_cut ? rowsOfPiece(most, elements / rows) : std::max<int64_t>(1, rows);
    for (int64_t begin = 0; begin == 0 || begin < rows; begin += step) {
      Piece piece{.name = whole.name, .part = part, .begin = begin, .end = std::min(begin + step, rows)};
      piece.dtype = whole.dtype;
      piece.shape = whole.shape;
      if (is_cut) {
        piece.name += c10::str("[", piece.begin, ":", piece.end, "]");
        piece.shape[0] = piece.end - piece.begin;
      }
      piece.elements = product(piece.shape);
      addSegments(piece, whole);
      pieces_.push_back(std::move(piece));
    }
  }
  // Fragments: in order, of about the same number of elements each: what is near in the model travels together.
  int64_t taken = 0;
  size_t at = first_piece;
  for (int64_t f = 0; f < fragments; ++f) {
    const auto left_over = static_cast<size_t>(fragments - f - 1);
    do {
      taken += pieces_[at].elements;
      pieces_[at++].fragment = f;
    } while (at + left_over < pieces_.size() && (left_over == 0 || taken * fragments < total * (f + 1)));
  }
}

void SiteModel::addSegments(const Piece& piece, const Whole& whole) {
  int64_t covered = 0;
  std::set<Box> boxes;
  for (const auto& [rank, i] : whole.holdings) {
    const Holding& holding = held_[rank][i];
    const int64_t rows = rowsOf(holding.size), elements = product(holding.size);
    const int64_t low = holding.offset.empty() ? 0 : holding.offset[0];
    const int64_t begin = std::max(piece.begin, low), end = std::min(piece.end, low + rows);
    if (elements == 0 || begin >= end) continue;
    const int64_t held = (end - begin) * (elements / rows);
    if (boxes.emplace(holding.offset, holding.size).second) covered += held;
    segments_.push_back({pieces_.size(), rank, i, begin, end, held});
  }
  if (covered != piece.elements) {
    throw ValueError(c10::str("DiLoCoX: ", piece.name, ": expected the ranks of the site to hold each of its ",
                              piece.elements, " elements once, or in equal boxes, got ", covered));
  }
}

// Every piece to the stripe with the fewest elements so far, the largest first, fragment by fragment.
void SiteModel::deal(int part, const std::vector<int>& holders, int first, int stripes, int64_t fragments) {
  std::vector<int64_t> loads(stripes, 0);
  for (int64_t f = 0; f < fragments; ++f) {
    std::vector<Piece*> dealt;
    for (Piece& piece : pieces_) {
      if (piece.part == part && piece.fragment == f) dealt.push_back(&piece);
    }
    std::stable_sort(dealt.begin(), dealt.end(),
                     [](const Piece* a, const Piece* b) { return a->elements > b->elements; });
    for (Piece* piece : dealt) {
      const auto least = std::min_element(loads.begin(), loads.end());
      *least += piece->elements;
      const auto stripe = least - loads.begin();
      piece->stripe = first + static_cast<int>(stripe);
      piece->carrier = holders[static_cast<size_t>(stripe) % holders.size()];
    }
  }
}

// One holding for every box of a piece, from which collect() takes it: the carrier's where that has it, or, where
// replicas may differ, the first one's.
void SiteModel::chooseSources(bool same_values) {
  std::map<std::pair<size_t, Box>, size_t> sources;
  for (size_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    const Holding& holding = held_[segment.holder][segment.holding];
    const auto [at, is_new] = sources.try_emplace({segment.piece, Box(holding.offset, holding.size)}, s);
    if (same_values && !is_new && segment.holder == pieces_[segment.piece].carrier) at->second = s;
  }
  for (const auto& [box, s] : sources)
    segments_[s].source = true;
}

// Memory for the pieces that this rank carries: its own parameter's where that has the whole piece.
void SiteModel::place() {
  for (Segment& segment : segments_) {
    Piece& piece = pieces_[segment.piece];
    segment.direct = segment.source && segment.holder == piece.carrier && segment.elements == piece.elements;
    moves_ = moves_ || !segment.direct;
    if (!segment.direct || piece.carrier != rank_) continue;
    piece.parameter = static_cast<int>(segment.holding);
    piece.tensor = atHolder(segment, parameters_[segment.holding].tensor);
  }
  for (Piece& piece : pieces_) {
    if (piece.carrier == rank_ && !piece.tensor.defined()) piece.tensor = at::zeros(piece.shape, piece.dtype);
  }
}

std::vector<OuterParameter> SiteModel::pieces(size_t stripe, int64_t fragment) const {
  std::vector<OuterParameter> found;
  uint32_t number = 0;
  for (const Piece& piece : pieces_) {
    if (piece.part != parts_[rank_]) continue;
    if (piece.stripe == stripes_[stripe] && piece.fragment == fragment)
      found.push_back({piece.name, piece.tensor, {}, {}, number});
    ++number;
  }
  return found;
}

std::vector<int64_t> SiteModel::stripeElements() const {
  std::vector<int64_t> elements(part_stripes_, 0);
  for (const Piece& piece : pieces_) {
    if (piece.part == parts_[rank_]) elements[piece.stripe - first_stripe_] += piece.elements;
  }
  return elements;
}

std::string SiteModel::shapes() const {
  std::string text;
  for (const Piece& piece : pieces_) {
    if (piece.part == parts_[rank_]) text += c10::str(piece.name, '[', joined(piece.shape), "] ");
  }
  return text;
}

std::string SiteModel::text() const {
  const std::string text = shapes();
  return c10::str(std::count(text.begin(), text.end(), ' '), ", hash ", fnv1a(text), ", stripes ", part_stripes_);
}

}  // namespace lowcomm
