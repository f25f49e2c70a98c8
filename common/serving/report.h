// A run's measurements, as tables and as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "common/serving/served_engine.h"
#include "common/serving/tally.h"

namespace common {

// For the steps that only decode: the time that reading their weights, K and V takes at the speed of the memory, as a
// share of the time that the steps took. 0: the limit is not known, or there were no such steps.
double roofline_share(const Tally& tally, const std::optional<ReadLimit>& limit);

// The tally has kept its values.
std::string report_table(const ServedEngine& engine, const Tally& tally, const std::optional<ReadLimit>& limit);
nlohmann::ordered_json report_json(const ServedEngine& engine, const Tally& tally,
                                   const std::optional<ReadLimit>& limit);

}  // namespace common
