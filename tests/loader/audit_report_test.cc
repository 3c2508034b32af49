// The JSON report against docs/audit.schema.json, by a validator of the few keywords that the schema uses.
#include "loader/audit/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "loader/error.h"
#include "tests/loader/support/audit_support.h"

namespace dsv41::audit {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

class Schema {
 public:
  explicit Schema(const fs::path& file) : root_(Json::parse(std::ifstream(file))) {}

  std::vector<std::string> complaints(const Json& value) {
    complaints_.clear();
    judge(root_, value, "report");
    return complaints_;
  }

 private:
  void complain(const std::string& where, const std::string& what) {
    complaints_.push_back(where + ": " + what);
  }

  static bool has_type(const Json& value, const std::string& type) {
    if (type == "object") return value.is_object();
    if (type == "array") return value.is_array();
    if (type == "string") return value.is_string();
    if (type == "boolean") return value.is_boolean();
    if (type == "integer") return value.is_number_integer();
    if (type == "number") return value.is_number();
    throw std::invalid_argument("the validator does not know type " + type);
  }

  void judge(const Json& schema, const Json& value, const std::string& where) {
    for (const auto& [keyword, argument] : schema.items()) {
      if (keyword == "type") {
        if (!has_type(value, argument)) return complain(where, "is no " + argument.get<std::string>());
      } else if (keyword == "$ref") {
        judge(root_.at(Json::json_pointer(argument.get<std::string>().substr(1))), value, where);
      } else if (keyword == "enum") {
        if (std::find(argument.begin(), argument.end(), value) == argument.end())
          complain(where, "is not in the enum");
      } else if (keyword == "pattern") {
        if (!std::regex_search(value.get<std::string>(), std::regex(argument.get<std::string>())))
          complain(where, "does not match");
      } else if (keyword == "minimum") {
        if (value.get<double>() < argument.get<double>()) complain(where, "is too small");
      } else if (keyword == "minItems") {
        if (value.size() < argument.get<std::size_t>()) complain(where, "is too short");
      } else if (keyword == "maxItems") {
        if (value.size() > argument.get<std::size_t>()) complain(where, "is too long");
      } else if (keyword == "required") {
        for (const Json& name : argument)
          if (!value.contains(name.get<std::string>())) complain(where, "lacks " + name.get<std::string>());
      } else if (keyword == "items") {
        for (std::size_t i = 0; i < value.size(); ++i)
          judge(argument, value[i], where + "[" + std::to_string(i) + "]");
      } else if (keyword == "properties") {
        for (const auto& [name, property] : argument.items())
          if (value.contains(name)) judge(property, value[name], where + "." + name);
      } else if (keyword == "additionalProperties") {
        for (const auto& [name, content] : value.items()) {
          if (schema.contains("properties") && schema["properties"].contains(name)) continue;
          if (argument.is_boolean())
            complain(where, "has an unexpected " + name);
          else
            judge(argument, content, where + "." + name);
        }
      } else if (keyword != "$schema" && keyword != "title" && keyword != "description" &&
                 keyword != "$defs") {
        throw std::invalid_argument("the validator does not know " + keyword);
      }
    }
  }

  Json root_;
  std::vector<std::string> complaints_;
};

Schema schema() {
  return Schema(fs::path(DSV41_TEST_DATA) / "../../docs/audit.schema.json");
}

Json report_of(const AuditOptions& base, const fs::path& scratch) {
  AuditOptions options = base;
  options.json = scratch / "report.json";
  std::ostringstream out, err;
  run_audit(options, out, err);
  return Json::parse(std::ifstream(*options.json));
}

TEST(AuditReport, JsonFitsTheSchemaAndSumsUp) {
  const Directory directory;
  AuditOptions options = options_for(fs::path(DSV41_TEST_CHECKPOINTS) / "mini");
  options.verify_payload = true;
  options.manifest = directory.path() / "manifest.jsonl";
  options.quiet = true;
  const Json report = report_of(options, directory.path());
  EXPECT_THAT(schema().complaints(report), ::testing::IsEmpty());
  std::uint64_t tensors = 0, bytes = 0;
  for (const Json& category : report["categories"]) {
    tensors += category["tensors"].get<std::uint64_t>();
    bytes += category["bytes"].get<std::uint64_t>();
  }
  EXPECT_EQ(report["tensors"], tensors);
  EXPECT_EQ(report["bytes"], bytes);
  EXPECT_EQ(report["payload"]["bytes"], bytes);
  EXPECT_EQ(report["checks"].size(), 39u);
  EXPECT_EQ(report["complete"], true);
  EXPECT_EQ(report["index"]["indexed"], true);
  EXPECT_EQ(report["index"]["shipped_tensors"], tensors);
}

TEST(AuditReport, WithoutAnIndexTheBlockSaysSo) {
  const Directory directory;
  Tree tree = released_tree();
  tree.write_index = false;
  TreeOptions write;
  write.shards = {1, 2};
  write_tree(tree, directory.path(), write);
  const Json report = report_of(options_for(directory.path()), directory.path());
  EXPECT_THAT(schema().complaints(report), ::testing::IsEmpty());
  EXPECT_EQ(report["index"].dump(),
            R"({"indexed":false,"local_shards":[],"pending_shards":[],"shipped_tensors":0})");
  EXPECT_EQ(report["complete"], false);
  EXPECT_EQ(report["shards"], 2);
}

TEST(AuditReport, SchemaRefusesWhatItShould) {
  Json report = Json::parse(json_report(audit(options_for(fs::path(DSV41_TEST_CHECKPOINTS) / "mini"))));
  Schema judge = schema();
  EXPECT_THAT(judge.complaints(report), ::testing::IsEmpty());
  report["checks"][0]["status"] = "maybe";
  EXPECT_EQ(judge.complaints(report).size(), 1u);
  report["surplus"] = 1;
  report.erase("tensors");
  EXPECT_EQ(judge.complaints(report).size(), 3u);
}

TEST(AuditReport, ColourAndJsonOnTheOutputStream) {
  AuditOptions options = options_for(fs::path(DSV41_TEST_CHECKPOINTS) / "mini");
  options.colour = true;
  options.json = "-";
  std::ostringstream out, err;
  EXPECT_EQ(run_audit(options, out, err), 0);
  EXPECT_NO_THROW(Json::parse(out.str()));
  EXPECT_THAT(err.str(), HasSubstr("\x1b[32mpass\x1b[0m"));
  EXPECT_THAT(err.str(), HasSubstr("39/39 checks passed, 0 undecided, 0 failed"));
  options.json = fs::path(DSV41_TEST_CHECKPOINTS) / "mini/absent/report.json";
  EXPECT_THROW(run_audit(options, out, err), ResourceError);
}

}  // namespace
}  // namespace dsv41::audit
