//! Chat templates: minijinja set up to render as transformers' sandboxed Jinja does.
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{escape_formatter, Environment, Error, ErrorKind, Output, State};
use serde_json::{json, Map, Value as Json};

use crate::jinja_source;
use crate::json::{dumps, float, Style};
use crate::neutralize::Neutralizer;

const NAME: &str = "chat_template";
/// Work a render may do: an instruction or 64 bytes cost about one. Real templates need a few hundred a message; the
/// limit stops an endless one within a second.
const FUEL: u64 = 10_000_000;

pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
    neutralizer: Neutralizer,
    arguments: Arguments,
}

/// How a template wants the arguments of a tool call.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Arguments {
    Object,
    Text,
}

impl ChatTemplate {
    pub fn new(
        source: &str,
        bos_token: &str,
        eos_token: &str,
        special_tokens: Vec<String>,
    ) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| error.to_string())?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(print);
        environment.add_filter("string", string);
        environment.add_test("iterable", |value: &Value| {
            !value.is_none() && value.try_iter().is_ok()
        });
        environment.add_filter("tojson", tojson);
        environment.add_filter("__iterable", iterable);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned(NAME, jinja_source::prepare(source))
            .map_err(|error| describe(&error))?;
        let mut template = Self {
            environment,
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
            neutralizer: Neutralizer::new(special_tokens),
            arguments: Arguments::Object,
        };
        template.arguments = template.probe_arguments(source);
        Ok(template)
    }

    pub fn render(
        &self,
        messages_json: &str,
        tools_json: &str,
        extra_json: &str,
        add_generation_prompt: bool,
    ) -> Result<String, String> {
        let Json::Array(messages) = parse(messages_json, "messages")? else {
            return Err("messages must be an array".into());
        };
        let messages = messages
            .into_iter()
            .enumerate()
            .map(|(i, message)| match message {
                Json::Object(message) => Ok(Json::Object(self.normalize(message))),
                _ => Err(format!("messages[{i}] must be an object")),
            })
            .collect::<Result<Vec<_>, String>>()?;
        let tools = match tools_json.is_empty() {
            true => Json::Null,
            false => parse(tools_json, "tools")?,
        };
        let tools = match tools {
            Json::Array(tools) if tools.is_empty() => Json::Null,
            Json::Array(_) | Json::Null => tools,
            _ => return Err("tools must be an array".into()),
        };
        let extra = match extra_json.is_empty() {
            true => Map::new(),
            false => match parse(extra_json, "chat_template_kwargs")? {
                Json::Object(extra) => extra,
                Json::Null => Map::new(),
                _ => return Err("chat_template_kwargs must be an object".into()),
            },
        };
        self.render_values(Json::Array(messages), tools, extra, add_generation_prompt)
    }

    fn render_values(
        &self,
        messages: Json,
        tools: Json,
        extra: Map<String, Json>,
        add_generation_prompt: bool,
    ) -> Result<String, String> {
        let Json::Object(mut context) = self.neutralizer.value(Json::Object(extra)) else {
            unreachable!()
        };
        context.insert("messages".into(), self.neutralizer.value(messages));
        context.insert("tools".into(), self.neutralizer.value(tools));
        context.insert("documents".into(), Json::Null);
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        context.insert("bos_token".into(), self.bos_token.as_str().into());
        context.insert("eos_token".into(), self.eos_token.as_str().into());
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| describe(&error))?;
        template
            .render(Value::from(Serde(&context)))
            .map_err(|error| describe(&error))
    }

    /// Forms that break templates are made plain: absent or null content becomes "", null tool calls vanish, and
    /// arguments take the form that the template wants.
    fn normalize(&self, mut message: Map<String, Json>) -> Map<String, Json> {
        if message.get("content").is_none_or(Json::is_null) {
            message.insert("content".into(), "".into());
        }
        if message.get("tool_calls").is_some_and(Json::is_null) {
            message.shift_remove("tool_calls");
        }
        if let Some(Json::Array(calls)) = message.get_mut("tool_calls") {
            for call in calls {
                if let Some(arguments) = call.pointer_mut("/function/arguments") {
                    self.convert_arguments(arguments);
                }
            }
        }
        message
    }

    fn convert_arguments(&self, arguments: &mut Json) {
        match (self.arguments, &*arguments) {
            (Arguments::Object, Json::String(text)) => {
                if let Ok(object @ Json::Object(_)) = serde_json::from_str(text) {
                    *arguments = object;
                }
            }
            (Arguments::Text, Json::Object(_)) => *arguments = dumps(arguments, &Style::default()).into(),
            _ => {}
        }
    }

    /// Object is the convention; some templates paste the arguments as text and fail, or lose them, otherwise.
    fn probe_arguments(&self, source: &str) -> Arguments {
        if !source.contains("tool_calls") {
            return Arguments::Object;
        }
        let works = |arguments: Json| {
            let messages = json!([
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "", "tool_calls": [
                    {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}]},
            ]);
            let text = self.render_values(messages, Json::Null, Map::new(), false);
            text.is_ok_and(|text| text.contains("probe_key") && text.contains("probe_value"))
        };
        let object = json!({"probe_key": "probe_value"});
        if !works(object.clone()) && works(dumps(&object, &Style::default()).into()) {
            Arguments::Text
        } else {
            Arguments::Object
        }
    }
}

fn parse(text: &str, what: &str) -> Result<Json, String> {
    serde_json::from_str(text).map_err(|error| format!("{what}: {error}"))
}

/// The template's own words where it refuses, else what went wrong and where.
fn describe(error: &Error) -> String {
    if let Some(refusal) = std::error::Error::source(error).and_then(|s| s.downcast_ref::<Refusal>()) {
        return refusal.0.clone();
    }
    let line = error
        .line()
        .map(|line| format!(" (line {line} of the chat template)"))
        .unwrap_or_default();
    match error.kind() {
        ErrorKind::OutOfFuel => format!("the chat template takes too many steps{line}"),
        kind => match error.detail() {
            Some(detail) => format!("chat template: {kind}: {detail}{line}"),
            None => format!("chat template: {kind}{line}"),
        },
    }
}

#[derive(Debug)]
struct Refusal(String);

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
}

fn strftime_now(format: String) -> Result<String, Error> {
    jiff::fmt::strtime::format(&format, &jiff::ZonedDateTime::now())
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

/// A float as Python writes it; nothing for other types, which minijinja writes as Python does.
fn spelled_float(value: &Value) -> Option<String> {
    let number = value.is_number() && !value.is_integer();
    number
        .then(|| f64::try_from(value.clone()).ok().map(float))
        .flatten()
}

fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match spelled_float(value) {
        Some(text) => out.write_str(&text).map_err(Error::from),
        None => escape_formatter(out, state, value),
    }
}

fn string(state: &State, value: &Value) -> Result<Value, Error> {
    match spelled_float(value) {
        Some(text) => Ok(text.into()),
        None => minijinja::filters::string(state, value),
    }
}

fn iterable(value: Value) -> Result<Value, Error> {
    if value.is_none() {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "'NoneType' object is not iterable",
        ));
    }
    Ok(value)
}

/// As in transformers: not escaped for HTML, keys in their order, Python's separators.
fn tojson(value: Value, indent: Option<Value>, args: Kwargs) -> Result<String, Error> {
    let invalid = |what: &str| Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"));
    if value.is_undefined() {
        return Err(invalid("the value is undefined"));
    }
    let indent = match indent {
        Some(indent) => Some(indent),
        None => args.get::<Option<Value>>("indent")?,
    };
    let indent = match indent {
        None => None,
        Some(v) if v.is_none() => None,
        Some(v) => Some(match v.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(
                usize::try_from(v)
                    .ok()
                    .filter(|n| *n <= 64)
                    .ok_or_else(|| invalid("bad indent"))?,
            ),
        }),
    };
    let mut style = Style {
        indent,
        ..Style::default()
    };
    if style.indent.is_some() {
        style.item_separator = ",".into();
    }
    if let Some(separators) = args.get::<Option<Value>>("separators")?.filter(|v| !v.is_none()) {
        let parts: Vec<Value> = separators.try_iter()?.collect();
        match (
            parts.first().and_then(Value::as_str),
            parts.get(1).and_then(Value::as_str),
        ) {
            (Some(item), Some(key)) if parts.len() == 2 => {
                style.item_separator = item.to_owned();
                style.key_separator = key.to_owned();
            }
            _ => return Err(invalid("separators must be two strings")),
        }
    }
    style.ensure_ascii = args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    style.sort_keys = args.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    args.assert_all_used()?;
    let json = serde_json::to_value(&value).map_err(|error| invalid(&error.to_string()))?;
    Ok(dumps(&json, &style))
}

#[cfg(test)]
mod tests;
