//! A client for one HTTP/1.1 request to a server on this machine.
//!
//! Invariant: a request can be ended from another thread at any moment by closing its connection, which is how llama-server
//! is told to stop generating; a body without its proper end is an error, never a short answer.
//!
//! Own code and no crate, since the first of the two is all that matters here: `ureq` gives nobody a handle on the socket of a
//! request that another thread reads from, and `hyper` has one at the price of an asynchronous runtime.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// How long a connection may take to be accepted.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Longest header line and body line that are accepted.
const LINE_LIMIT: u64 = 64 << 20;

/// A server on this machine.
#[derive(Debug, Clone)]
pub struct Server {
    port: u16,
    key: String,
}

/// An answer whose body is still to be read.
#[derive(Debug)]
pub struct Response {
    /// The status code.
    pub status: u16,
    body: BufReader<TcpStream>,
    framing: Framing,
}

#[derive(Debug)]
enum Framing {
    /// Bytes that are left.
    Length(u64),
    /// Bytes that are left of the chunk; `None` after the last chunk.
    Chunked(Option<u64>),
    /// Until the connection's end.
    Close,
}

/// A handle that ends a request.
#[derive(Debug)]
pub struct Hangup(TcpStream);

impl Hangup {
    /// Closes the connection.
    pub fn hang_up(&self) {
        // A connection that is closed already is what was asked for.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Server {
    /// A server at a port, with its key.
    pub fn new(port: u16, key: String) -> Self {
        Self { port, key }
    }

    /// Sends a request. `limit` bounds each read of the answer; `connected` gets the means to end it.
    pub fn send(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        limit: Option<Duration>,
        connected: impl FnOnce(Hangup),
    ) -> io::Result<Response> {
        let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, self.port);
        let mut stream = TcpStream::connect_timeout(&address.into(), CONNECT_LIMIT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(limit)?;
        connected(Hangup(stream.try_clone()?));
        let body = body.map(Value::to_string).unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            self.port,
            self.key,
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        Response::read_head(BufReader::new(stream))
    }

    /// Sends a request and reads the whole answer as JSON.
    pub fn ask(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        limit: Duration,
    ) -> io::Result<(u16, Value)> {
        let mut response = self.send(method, path, body, Some(limit), |_| {})?;
        let text = response.text()?;
        let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
        Ok((response.status, value))
    }
}

impl Response {
    fn read_head(mut body: BufReader<TcpStream>) -> io::Result<Self> {
        let status_line = line(&mut body)?;
        let status = status_line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.ok_or_else(|| damaged(&format!("status line {status_line:?}")))?;
        let mut framing = Framing::Close;
        loop {
            let header = line(&mut body)?;
            if header.is_empty() {
                return Ok(Self {
                    status,
                    body,
                    framing,
                });
            }
            let Some((name, value)) = header.split_once(':') else {
                continue;
            };
            let value = value.trim();
            match name.to_ascii_lowercase().as_str() {
                "content-length" if !matches!(framing, Framing::Chunked(_)) => {
                    framing = Framing::Length(value.parse().map_err(|_| damaged("content-length"))?);
                }
                "transfer-encoding" if value.eq_ignore_ascii_case("chunked") => {
                    framing = Framing::Chunked(Some(0))
                }
                _ => {}
            }
        }
    }

    /// The rest of the body as text.
    pub fn text(&mut self) -> io::Result<String> {
        let mut bytes = Vec::new();
        self.by_ref().take(LINE_LIMIT).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The `data:` of the next event of a `text/event-stream`; `None` at the body's proper end.
    pub fn next_data(&mut self) -> io::Result<Option<String>> {
        let mut collected = Vec::new();
        loop {
            let mut byte = [0];
            if self.read(&mut byte)? == 0 {
                return Ok(None);
            }
            if byte[0] != b'\n' {
                collected.push(byte[0]);
                if collected.len() as u64 > LINE_LIMIT {
                    return Err(damaged("endless line"));
                }
                continue;
            }
            let text = String::from_utf8_lossy(&collected);
            if let Some(data) = text.trim_end_matches('\r').strip_prefix("data:") {
                return Ok(Some(data.trim_start().to_owned()));
            }
            // A blank line ends an event, a comment is a sign of life; neither carries anything.
            collected.clear();
        }
    }
}

impl Read for Response {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &mut self.framing {
            Framing::Close => self.body.read(buffer),
            Framing::Length(0) => Ok(0),
            Framing::Length(left) => {
                let count = self.body.by_ref().take(*left).read(buffer)?;
                if count == 0 && !buffer.is_empty() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                *left -= count as u64;
                Ok(count)
            }
            Framing::Chunked(None) => Ok(0),
            Framing::Chunked(Some(left)) => {
                if *left == 0 {
                    let size = line(&mut self.body)?;
                    let digits = size.split(';').next().unwrap_or_default().trim();
                    *left = u64::from_str_radix(digits, 16)
                        .map_err(|_| damaged(&format!("chunk size {size:?}")))?;
                    if *left == 0 {
                        while !line(&mut self.body)?.is_empty() {}
                        self.framing = Framing::Chunked(None);
                        return Ok(0);
                    }
                }
                let count = self.body.by_ref().take(*left).read(buffer)?;
                if count == 0 && !buffer.is_empty() {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                *left -= count as u64;
                if *left == 0 && !line(&mut self.body)?.is_empty() {
                    return Err(damaged("chunk without its end"));
                }
                Ok(count)
            }
        }
    }
}

fn line(input: &mut impl BufRead) -> io::Result<String> {
    let mut bytes = Vec::new();
    input.take(64 << 10).read_until(b'\n', &mut bytes)?;
    if bytes.pop() != Some(b'\n') {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if bytes.last() == Some(&b'\r') {
        bytes.pop();
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("damaged HTTP answer: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn answer(bytes: &'static [u8]) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            stream.write_all(bytes).unwrap();
        });
        Server::new(port, "key".to_owned())
    }

    const LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn bodies_with_length_and_in_chunks_are_read() {
        let server = answer(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{\"a\":1}");
        assert_eq!(
            server.ask("GET", "/", None, LIMIT).unwrap(),
            (200, serde_json::json!({"a": 1}))
        );
        let server = answer(
            b"HTTP/1.1 503 X\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{\"a\"\r\n3\r\n:1}\r\n0\r\n\r\n",
        );
        assert_eq!(
            server.ask("GET", "/", None, LIMIT).unwrap(),
            (503, serde_json::json!({"a": 1}))
        );
    }

    #[test]
    fn a_body_without_its_end_is_an_error() {
        let server = answer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{\"a\"\r\n");
        assert!(server.ask("GET", "/", None, LIMIT).is_err());
        let server = answer(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{");
        assert!(server.ask("GET", "/", None, LIMIT).is_err());
    }

    #[test]
    fn events_are_found_between_comments_and_across_chunks() {
        let server = answer(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n: ping\n\n\r\na\r\ndata: {\"a\"\r\n11\r\n:1}\n\ndata: [x]\n\n\n\r\n0\r\n\r\n",
        );
        let mut response = server.send("GET", "/", None, Some(LIMIT), |_| {}).unwrap();
        assert_eq!(response.next_data().unwrap().as_deref(), Some("{\"a\":1}"));
        assert_eq!(response.next_data().unwrap().as_deref(), Some("[x]"));
        assert_eq!(response.next_data().unwrap(), None);
    }
}
