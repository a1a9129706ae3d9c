//! A strict reader of JSON objects: every member is either taken by name or refused by name, and every refusal says
//! where in the request it happened (`options.temperature`, `messages[2].content[0].type`).

use serde_json::{Map, Value};

use crate::ErrorCode;

/// What is wrong with a request, before its `id` is put to it.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) code: ErrorCode,
    pub(crate) message: String,
}

impl Fault {
    pub(crate) fn invalid(message: String) -> Self {
        Self {
            code: ErrorCode::InvalidRequest,
            message,
        }
    }
}

pub(crate) type Result<T> = std::result::Result<T, Fault>;

/// An object whose members are all among those that its reader knows.
pub(crate) struct Fields {
    path: String,
    map: Map<String, Value>,
}

impl Fields {
    /// Refuses members outside `known` before anything else is looked at: a misspelt name is reported as such and not as
    /// the absence of the right one.
    pub(crate) fn new(path: String, map: Map<String, Value>, known: &[&str]) -> Result<Self> {
        let fields = Self { path, map };
        match fields.map.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(fields),
            Some(key) => Err(Fault {
                code: ErrorCode::UnknownField,
                message: format!(
                    "unknown field `{}`, expected one of {}",
                    fields.path_of(&excerpt(key)),
                    known
                        .iter()
                        .map(|name| format!("`{name}`"))
                        .collect::<Vec<_>>()
                        .join(", "),
                ),
            }),
        }
    }

    pub(crate) fn take(&mut self, name: &str) -> Option<Field> {
        let value = self.map.shift_remove(name)?;
        Some(Field {
            path: self.path_of(name),
            value,
        })
    }

    pub(crate) fn require(&mut self, name: &str) -> Result<Field> {
        self.take(name)
            .ok_or_else(|| Fault::invalid(format!("field `{}` is missing", self.path_of(name))))
    }

    pub(crate) fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }
}

/// One value and where it stands in the request.
pub(crate) struct Field {
    pub(crate) path: String,
    pub(crate) value: Value,
}

impl Field {
    /// The fault of a value that is not `expected`, which completes "must be …".
    pub(crate) fn refuse(&self, expected: &str) -> Fault {
        refuse(&self.path, expected, &self.value)
    }

    pub(crate) fn string(self) -> Result<String> {
        match self.value {
            Value::String(text) => Ok(text),
            _ => Err(self.refuse("a string")),
        }
    }

    pub(crate) fn non_empty_string(self) -> Result<String> {
        match self.value {
            Value::String(text) if !text.is_empty() => Ok(text),
            _ => Err(self.refuse("a non-empty string")),
        }
    }

    pub(crate) fn boolean(self) -> Result<bool> {
        self.value.as_bool().ok_or_else(|| self.refuse("a boolean"))
    }

    pub(crate) fn array(self) -> Result<(String, Vec<Value>)> {
        match self.value {
            Value::Array(items) => Ok((self.path, items)),
            _ => Err(self.refuse("an array")),
        }
    }

    /// The array's items, each knowing its index.
    pub(crate) fn items(self) -> Result<impl Iterator<Item = Field>> {
        let (path, items) = self.array()?;
        Ok(items.into_iter().enumerate().map(move |(index, value)| Field {
            path: format!("{path}[{index}]"),
            value,
        }))
    }

    pub(crate) fn strings(self) -> Result<Vec<String>> {
        self.items()?.map(Field::string).collect()
    }

    /// Token ids. Prompts run to millions of ids, so a path is formed only for the one that is refused.
    pub(crate) fn token_ids(self) -> Result<Vec<u32>> {
        let (path, items) = self.array()?;
        items
            .iter()
            .enumerate()
            .map(|(index, value)| {
                value
                    .as_u64()
                    .and_then(|id| u32::try_from(id).ok())
                    .ok_or_else(|| {
                        refuse(
                            &format!("{path}[{index}]"),
                            "a token id (an integer from 0 to 4294967295)",
                            value,
                        )
                    })
            })
            .collect()
    }

    pub(crate) fn map(self) -> Result<(String, Map<String, Value>)> {
        match self.value {
            Value::Object(map) => Ok((self.path, map)),
            _ => Err(self.refuse("an object")),
        }
    }

    pub(crate) fn object(self, known: &[&str]) -> Result<Fields> {
        let (path, map) = self.map()?;
        Fields::new(path, map, known)
    }

    /// An integer that satisfies `accept`; `expected` completes "must be …".
    pub(crate) fn integer(self, expected: &str, accept: impl FnOnce(i64) -> bool) -> Result<i64> {
        match self.value.as_i64() {
            Some(number) if accept(number) => Ok(number),
            _ => Err(self.refuse(expected)),
        }
    }

    pub(crate) fn unsigned<T: TryFrom<u64>>(
        self,
        expected: &str,
        accept: impl FnOnce(u64) -> bool,
    ) -> Result<T> {
        match self.value.as_u64() {
            Some(number) if accept(number) => T::try_from(number).map_err(|_| self.refuse(expected)),
            _ => Err(self.refuse(expected)),
        }
    }

    /// A number that satisfies `accept` as the `f32` that it is computed with: a value that narrows to infinity, or to a
    /// zero where zero is out of range, is refused here and not met later.
    pub(crate) fn number(self, expected: &str, accept: impl FnOnce(f32) -> bool) -> Result<f32> {
        match self.value.as_f64().map(|number| number as f32) {
            Some(number) if number.is_finite() && accept(number) => Ok(number),
            _ => Err(self.refuse(expected)),
        }
    }
}

fn refuse(path: &str, expected: &str, value: &Value) -> Fault {
    let got = match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.is_empty() => "an empty string".to_owned(),
        Value::String(text) => format!("the string \"{}\"", excerpt(text)),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    };
    Fault::invalid(format!("field `{path}` must be {expected}, got {got}"))
}

/// At most 64 characters of what a host sent: a message never grows with the line that it is about.
pub(crate) fn excerpt(text: &str) -> String {
    match text.char_indices().nth(64) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
