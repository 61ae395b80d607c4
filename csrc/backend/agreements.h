#pragma once

#include <string>
#include <utility>
#include <vector>

#include "backend/group_parts.h"
#include "wire/layout.h"

namespace lowcomm {

// Agreements of a group's ranks on what was not known when the group was made. Collective; DistBackendError names the
// first value that differs and where.

// Changes the policy of a living group. Throws ValueError where this rank's text is wrong, and when it throws nothing
// has changed. Ops issued before keep the old policy.
void setPolicy(GroupParts& parts, const std::string& text);

// On named layouts. `error`, unless it is empty, is what keeps this rank from taking part: the peers get it as theirs,
// this one returns.
void agreeOnLayouts(GroupParts& parts, const std::vector<std::pair<std::string, Layout>>& layouts,
                    const std::string& error);

// The same of any named texts, options of a hook say; `what` begins the messages.
void agreeOnTexts(GroupParts& parts, const std::string& what, std::vector<std::pair<std::string, std::string>> fields,
                  const std::string& error);

}  // namespace lowcomm
