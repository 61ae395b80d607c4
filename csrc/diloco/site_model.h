#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "diloco/outer_tensor.h"

namespace lowcomm {

// A model that the ranks of a site hold, cut into pieces for the slow links between sites, and the way of the pieces
// between the ranks that hold them and the ranks that average them.
//
// A piece is a parameter of the model, whole, or some rows of it where it is large. The pieces of a part are dealt out
// to stripes, in about equal numbers of elements. A stripe is what one rank of every site averages over a group of its
// own: stripe l of K stripes is carried by rank l mod (ranks of the part). So a site sends each piece once, whatever
// number of ranks holds it. Pieces and stripes follow from the names and shapes of the whole parameters and from K
// alone: sites that shard a model differently have the same ones, and an average has the same bits however a site holds
// the model.
//
// For an outer step collect() brings a piece's elements from the ranks that hold them to the rank that carries its
// stripe, and spread() brings the new ones to every rank that holds any. Both are exact. A piece that its carrier holds
// in one place is a view of that place and is not copied. All ranks of the site call both, in the same order.
class SiteModel {
 public:
  // `parameters`: what this rank holds; their tensors keep their memory. `fragments`: parts of the pieces in order, of
  // about equal elements. `matrix_rank`: r of low-rank factors, whose matrices are not cut. `same_values`: whether
  // ranks that hold the same box must hold the same values. `error`: this rank cannot take part, for that reason.
  //
  // Collective over the site's ranks, whose holdings are compared. Throws ValueError on all of them: naming the rank
  // that had an error (that rank throws nothing of its own), a name that is held twice, in part, or with other values,
  // shapes or dtypes; PeerError.
  SiteModel(std::vector<OuterParameter> parameters, const OuterSite& site, int64_t fragments, int64_t matrix_rank,
            bool same_values, const std::string& error = {});

  // The stripes that this rank carries, ascending, of its part; numbers go through all parts of the site.
  const std::vector<int>& stripes() const { return stripes_; }

  // The pieces of a fragment in a stripe of stripes(), with numbers: views, or memory for collect() to fill.
  std::vector<OuterParameter> pieces(size_t stripe, int64_t fragment) const;

  // Elements of all fragments that each stripe of this rank's part averages.
  std::vector<int64_t> stripeElements() const;

  // This rank's part: names and shapes of the whole parameters' pieces, a word each. Equal at sites that hold the same
  // model in other ways.
  std::string shapes() const;

  // Their number and hash, and the part's number of stripes.
  std::string text() const;

  // Whether a rank of the site holds the same part as this one.
  bool isOfPart(int rank) const { return parts_[rank] == parts_[rank_]; }

  // Whether no rank of the site holds anything.
  bool empty() const { return pieces_.empty(); }

  // Whether any rank of the site has something to collect or spread.
  bool moves() const { return moves_; }

  void collect(int64_t fragment) { exchange(fragment, /*collects=*/true); }
  void spread(int64_t fragment) { exchange(fragment, /*collects=*/false); }

  // This rank's own parameters.
  const std::vector<OuterParameter>& parameters() const { return parameters_; }

 private:
  using Box = std::pair<std::vector<int64_t>, std::vector<int64_t>>;  // offset and size in a whole parameter
  struct Holding {                                                    // a box that a rank has
    std::string name;
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> whole, offset, size;
    uint32_t checksum = 0;
  };
  struct Whole {
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> shape;
    std::vector<std::pair<int, size_t>> holdings;  // rank of the site, index in held_[rank]
  };
  struct Piece {
    std::string name;
    int part;
    int64_t begin, end;  // rows of the whole parameter
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> shape = {};
    int64_t elements = 0, fragment = 0;
    int stripe = 0, carrier = 0;  // carrier: rank of the site
    at::Tensor tensor = {};       // on the carrier
    int parameter = -1;           // on the carrier: the parameter that the tensor is a view of; -1: memory of its own
  };
  struct Segment {  // the rows [begin, end) of a whole parameter that a piece and a holding share
    size_t piece;
    int holder;
    size_t holding;
    int64_t begin, end, elements;
    bool source = false;  // collected from here
    bool direct = false;  // the carrier's own memory
  };
  static std::string textOf(const std::vector<OuterParameter>& parameters, const std::string& error, bool checksums);
  static std::vector<Holding> parsed(const std::string& text);
  std::vector<Whole> wholes(const std::vector<int>& holders) const;
  void cut(int part, const std::vector<int>& holders, int64_t fragments, int64_t matrix_rank);
  void addSegments(const Piece& piece, const Whole& whole);
  void deal(int part, const std::vector<int>& holders, int first, int stripes, int64_t fragments);
  void chooseSources(bool same_values);
  void place();
  void exchange(int64_t fragment, bool collects);
  at::Tensor atHolder(const Segment& segment, const at::Tensor& parameter) const;
  at::Tensor atCarrier(const Segment& segment, const at::Tensor& piece) const;

  std::vector<OuterParameter> parameters_;
  const std::shared_ptr<OpQueue> ranks_;
  const int rank_;
  std::vector<std::vector<Holding>> held_;  // by rank of the site
  std::vector<int> parts_;
  std::vector<Piece> pieces_;
  std::vector<Segment> segments_;
  std::vector<int> stripes_;
  int first_stripe_ = 0, part_stripes_ = 1;  // of this rank's part
  bool moves_ = false;
};

}  // namespace lowcomm
