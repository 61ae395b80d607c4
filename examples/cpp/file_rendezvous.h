#pragma once

#include <chrono>
#include <filesystem>
#include <string>

#include "transport/transport.h"

namespace lowcomm {

// A rendezvous of processes that share a folder, for programs without torch's store: a file a key. The folder is for
// one group of one run, for what an earlier one left would be taken for its peers'.
class FileRendezvous final : public Rendezvous {
 public:
  // Makes the folder where it is not there. ValueError where it cannot.
  explicit FileRendezvous(std::filesystem::path folder);

  // ValueError where the key has a value already, or cannot be written.
  void set(const std::string& key, const std::string& value) override;

  // ValueError naming the key and the folder where it has no value after `timeout`.
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override;

 private:
  std::filesystem::path pathOf(const std::string& key) const;

  const std::filesystem::path folder_;
};

}  // namespace lowcomm
