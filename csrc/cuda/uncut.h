#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device.h"
#include "cuda/grid.h"
#include "kernels/philox.h"

namespace lowcomm::cuda {

// The grid codecs that are not cut, axis=channel and bucket=tensor, for tensors that lie on a CUDA device: the bytes
// and values of the host's codecs (codec/channel.cpp, codec/grid.h). FORMAT.md, "Channels" and "Payload of a grid
// codec". All families and options that the host takes with them but levels. To these kernels a tensor with one bucket
// is one channel.
//
// Pointers, `refused`, errors and threads are as in cuda/grid.h, and `run` is the whole tensor. `workspace` is memory
// of uncutWorkspaceBytes(run) bytes, aligned to 16, that only the calls of one stream use at a time; what is in it
// before and after is of no account. Several kernels and a clearing of memory are enqueued a call, nothing waits for
// the host: capturable in a CUDA graph.
//
// An encode reads the elements twice (statistics, codes), and once more where a range is a sum (range=l2, sign1). The
// order of sums is the format's, 64 chains a channel: a tensor of few channels has few chains, and with bucket=tensor
// that third read is far from the speed of memory.

// Throws as the calls below. 0 for no elements.
size_t uncutWorkspaceBytes(const GridRun& run);

// As encodeGrid, decodeGrid, decodeAddGrid.
void encodeUncut(const Place& place, const GridRun& run, void* payload, const void* x, const PhiloxKey& key,
                 void* workspace, uint32_t* refused);
void decodeUncut(const Place& place, const GridRun& run, void* y, const void* payload, void* workspace,
                 uint32_t* refused);
void decodeAddUncut(const Place& place, const GridRun& run, float* acc, const void* payload, void* workspace,
                    uint32_t* refused);

// ---- topk ----

// topk for tensors that lie on a CUDA device: the bytes and values of the host's codec (codec/topk.cpp). FORMAT.md,
// "topk".
//
// Pointers, `refused`, errors and threads are as in cuda/grid.h; `run` is the whole tensor under a topk codec,
// `payload` the whole payload. `workspace` is memory of topkWorkspaceBytes(run) bytes, aligned to 16, that only the
// calls of one stream use at a time; what is in it before and after is of no account. Several kernels and clearings of
// memory are enqueued a call, nothing waits for the host: capturable in a CUDA graph.
//
// The threshold is found exactly, by three histograms of the magnitudes' digits from the top; an encode reads the
// elements five times. As k is known by n alone, nothing of it waits for what the elements are.

// Throws as the calls below. 0 for no elements.
size_t topkWorkspaceBytes(const GridRun& run);

// As encodeGrid. Refuses what the values' codec refuses.
void encodeTopk(const Place& place, const GridRun& run, void* payload, const void* x, const PhiloxKey& key,
                void* workspace, uint32_t* refused);

// As decodeGrid and decodeAddGrid. Refuse what the host does: a header other than the run gives, places that
// are not k, do not ascend or are no element's, padding that is not 0, and what the values' codec refuses.
void decodeTopk(const Place& place, const GridRun& run, void* y, const void* payload, void* workspace,
                uint32_t* refused);
void decodeAddTopk(const Place& place, const GridRun& run, float* acc, const void* payload, void* workspace,
                   uint32_t* refused);

}  // namespace lowcomm::cuda
