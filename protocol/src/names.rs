//! Enumerations written as strings: every known name maps to one variant, and a name that this version doesn't know
//! is kept as it came, so that a reader neither fails on it nor changes it when it passes it on.

/// Defines an enumeration of wire names with a last variant `Other` for names from a newer version.
macro_rules! wire_names {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$variant_meta])* $variant,)+
            /// A name that this version doesn't know, as it was read. Only reading makes one.
            Other(String),
        }

        impl $name {
            /// Every name that this version writes, in the order of their definition.
            pub const KNOWN: &'static [$name] = &[$($name::$variant,)+];

            /// The name as it stands on the wire.
            pub fn as_str(&self) -> &str {
                match self {
                    $($name::$variant => $text,)+
                    $name::Other(name) => name,
                }
            }
        }

        impl From<&str> for $name {
            fn from(name: &str) -> Self {
                match name {
                    $($text => $name::$variant,)+
                    _ => $name::Other(name.to_owned()),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let name = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                Ok(Self::from(name.as_ref()))
            }
        }
    };
}

pub(crate) use wire_names;
