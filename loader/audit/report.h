// The report of an audit as text for people and as JSON (audit.schema.json in docs/ describes the latter).
#pragma once

#include <string>

#include "loader/audit/audit.h"

namespace dsv41::audit {

std::string text_report(const AuditReport& report, bool quiet, bool colour);
std::string json_report(const AuditReport& report);

}  // namespace dsv41::audit
