// Which of the tables runs here.
#pragma once

#include <string>
#include <vector>

#include "args.h"

namespace fitment {

// The tables that this processor runs, lowest first.
const std::vector<const Table*>& runnable_tables();

// The table in use: the highest one up to what was set.
const Table& table();

// Uses the table called `name`. Returns false when there is none that runs here.
bool set_table(const std::string& name);

}  // namespace fitment
