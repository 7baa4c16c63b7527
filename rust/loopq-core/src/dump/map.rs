//! A file seen as bytes without reading it first.
#![allow(unsafe_code)] // a map of a file is sound only while nobody changes the file

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::{Error, Result};

/// A read-only memory map.
#[derive(Debug)]
pub struct MappedFile {
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps a whole file; an empty one gives no bytes.
    ///
    /// # Safety
    /// Nobody writes to the file or truncates it while the value lives. Its bytes are borrowed as a slice, which must
    /// not change, and access to truncated pages ends the process. Files of a dump are written under another name and
    /// renamed when they are complete (`docs/formats/`). A process that opens one by its final name and does not write
    /// to it keeps this promise.
    pub unsafe fn open(path: &Path) -> Result<Self> {
        let io = |e: std::io::Error| Error::Io { path: path.to_path_buf(), reason: e.to_string() };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the map is private to this value and read only, and the caller promises that nobody changes the file.
        // Values are read as plain bytes, for which every bit pattern is valid.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { map: Some(map) })
    }

    /// The file's bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
