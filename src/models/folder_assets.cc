#include "models/folder_assets.h"

#include <algorithm>
#include <map>
#include <optional>

#include "models/checkpoint_text.h"
#include "models/config_json.h"
#include "ops/error.h"

namespace galley::models {
namespace {

using nlohmann::json;

json read_optional(const std::filesystem::path& path) {
  return std::filesystem::exists(path) ? read_json_object(path) : json::object();
}

/// tokenizer.json without its vocabulary and merges, which are most of it.
json tokenizer_outline(const std::filesystem::path& path, const std::string& text) {
  const auto skip_model = [](int depth, json::parse_event_t event, const json& parsed) {
    return depth != 1 || event != json::parse_event_t::key || parsed != "model";
  };
  json outline;
  try {
    outline = json::parse(text, skip_model);
  } catch (const json::exception& error) {
    throw ModelError(path.string() + ": not valid JSON: " + error.what());
  }
  if (!outline.is_object()) throw ModelError(path.string() + ": expected a JSON object");
  return outline;
}

std::map<std::string, std::int32_t> added_tokens(const std::filesystem::path& path, const json& outline) {
  std::map<std::string, std::int32_t> ids;
  const auto list = outline.find("added_tokens");
  if (list == outline.end() || list->is_null()) return ids;
  if (!list->is_array()) throw ModelError(path.string() + ": \"added_tokens\": expected a list");
  for (const json& token : *list) {
    if (!token.is_object() || !token.contains("content") || !token["content"].is_string() || !token.contains("id") ||
        !token["id"].is_number_unsigned() || token["id"].get<std::uint64_t>() > 0x7FFFFFFFU) {
      throw ModelError(path.string() + ": \"added_tokens\": expected entries with \"id\" and \"content\"");
    }
    ids[token["content"].get<std::string>()] = token["id"].get<std::int32_t>();
  }
  return ids;
}

/// A special token is written as its text or as an object that holds it; empty when absent.
std::string token_text(const std::filesystem::path& path, const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return {};
  if (found->is_string()) return found->get<std::string>();
  if (found->is_object() && found->contains("content") && (*found)["content"].is_string()) {
    return (*found)["content"].get<std::string>();
  }
  throw ModelError(path.string() + ": \"" + key + "\": expected a token's text");
}

/// `chat_template` is one template, or a list of named ones of which "default" is for conversations.
std::string named_template(const std::filesystem::path& path, const json& object) {
  const auto found = object.find("chat_template");
  if (found == object.end() || found->is_null()) return {};
  if (found->is_string()) return found->get<std::string>();
  const auto fail = [&](const std::string& what) { throw ModelError(path.string() + ": \"chat_template\": " + what); };
  if (!found->is_array()) fail("expected a template or a list of named templates");
  std::string names;
  for (const json& entry : *found) {
    if (!entry.is_object() || !entry.contains("name") || !entry["name"].is_string() || !entry.contains("template") ||
        !entry["template"].is_string()) {
      fail("expected entries with \"name\" and \"template\"");
    }
    const auto name = entry["name"].get<std::string>();
    if (name == "default") return entry["template"].get<std::string>();
    names += (names.empty() ? "" : ", ") + name;
  }
  if (!names.empty()) fail("no template is named \"default\", found " + names);
  return {};
}

std::string chat_template(const std::filesystem::path& folder, const json& tokenizer_config) {
  if (const auto path = folder / "chat_template.jinja"; std::filesystem::exists(path)) return read_text(path);
  if (const auto path = folder / "chat_template.json"; std::filesystem::exists(path)) {
    return named_template(path, read_json_object(path));
  }
  return named_template(folder / "tokenizer_config.json", tokenizer_config);
}

/// The ids under `key`: one, a list, or none.
std::vector<std::int32_t> token_ids(const std::filesystem::path& path, const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return {};
  std::vector<std::int32_t> ids;
  const auto add = [&](const json& id) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() > 0x7FFFFFFFU) {
      throw ModelError(path.string() + ": \"" + key + "\": expected token ids");
    }
    ids.push_back(id.get<std::int32_t>());
  };
  if (found->is_array()) {
    for (const json& id : *found) add(id);
  } else {
    add(*found);
  }
  return ids;
}

/// Whether the tokenizer's post-processor puts `token` in front of a single text.
bool processor_adds(const json& processor, const std::string& token) {
  if (!processor.is_object()) return false;
  if (const auto parts = processor.find("processors"); parts != processor.end() && parts->is_array()) {
    return std::ranges::any_of(*parts, [&](const json& part) { return processor_adds(part, token); });
  }
  const auto single = processor.find("single");
  if (single == processor.end() || !single->is_array() || single->empty()) return false;
  const json& first = single->front();
  const auto special = first.is_object() ? first.find("SpecialToken") : first.end();
  return first.is_object() && special != first.end() && special->is_object() && special->contains("id") &&
         (*special)["id"] == token;
}

}  // namespace

text::Assets folder_assets(const std::filesystem::path& folder, const nlohmann::json& config) {
  const auto tokenizer_path = folder / "tokenizer.json";
  const auto settings_path = folder / "tokenizer_config.json";
  const auto specials_path = folder / "special_tokens_map.json";
  const auto generation_path = folder / "generation_config.json";
  const auto config_path = folder / "config.json";

  text::Assets assets;
  assets.tokenizer_json = read_text(tokenizer_path);
  const json outline = tokenizer_outline(tokenizer_path, assets.tokenizer_json);
  const auto ids = added_tokens(tokenizer_path, outline);
  const json settings = read_optional(settings_path);
  const json specials = read_optional(specials_path);
  const json generation = read_optional(generation_path);
  assets.chat_template = chat_template(folder, settings);

  const auto special = [&](const char* key) {
    const std::string text = token_text(settings_path, settings, key);
    return text.empty() ? token_text(specials_path, specials, key) : text;
  };
  const auto text_of = [&](std::int32_t id) {
    const auto found = std::ranges::find_if(ids, [&](const auto& entry) { return entry.second == id; });
    return found == ids.end() ? std::string() : found->first;
  };
  const auto id_of = [&](const std::string& token) {
    const auto found = ids.find(token);
    return found == ids.end() ? std::optional<std::int32_t>() : found->second;
  };

  // Ids first from the token's text in tokenizer.json, which is what encodes; config.json only where that is silent.
  assets.bos_token = special("bos_token");
  if (const auto id = id_of(assets.bos_token)) {
    assets.bos_id = *id;
  } else if (const auto listed = token_ids(config_path, config, "bos_token_id"); !listed.empty()) {
    assets.bos_id = listed.front();
    if (assets.bos_token.empty()) assets.bos_token = text_of(assets.bos_id);
  }
  const auto add_bos = settings.find("add_bos_token");
  if (add_bos != settings.end() && add_bos->is_boolean()) {
    assets.add_bos = add_bos->get<bool>();
  } else if (const auto processor = outline.find("post_processor"); processor != outline.end()) {
    assets.add_bos = !assets.bos_token.empty() && processor_adds(*processor, assets.bos_token);
  }
  if (assets.add_bos && assets.bos_id < 0) {
    throw ModelError(settings_path.string() + ": \"add_bos_token\" is true, but the id of bos_token \"" +
                     assets.bos_token + "\" is not known");
  }

  assets.eos_token = special("eos_token");
  if (const auto id = id_of(assets.eos_token)) add_end_id(assets, *id);
  for (const std::int32_t id : token_ids(generation_path, generation, "eos_token_id")) add_end_id(assets, id);
  for (const std::int32_t id : token_ids(config_path, config, "eos_token_id")) add_end_id(assets, id);
  for (const std::string& candidate : turn_end_candidates(assets.chat_template)) {
    if (const auto id = id_of(candidate)) add_end_id(assets, *id);
  }
  if (assets.end_ids.empty()) {
    throw ModelError(config_path.string() +
                     ": nothing ends a reply: expected \"eos_token_id\" here or in generation_config.json, or "
                     "\"eos_token\" in tokenizer_config.json");
  }
  if (assets.eos_token.empty()) assets.eos_token = text_of(assets.end_ids.front());
  return assets;
}

}  // namespace galley::models
