//! Every parser of the core, given bytes: what it says of them does not matter, only that it says it.

use std::borrow::Cow;
use std::path::PathBuf;
use std::{env, fs, process};

use loopq_core::hessian::{Accumulator, MatrixState, Settings, State};
use loopq_core::pack::{dense, marlin, w4};
use loopq_core::simd::Isa;
use loopq_core::{Cancel, Execution};

/// A parser and its name.
pub type Parser = (&'static str, fn(&[u8]));

/// All of them.
pub const PARSERS: [Parser; 5] =
    [("dense", dense), ("marlin", marlin), ("rows", rows), ("state", state), ("w4", w4)];

/// Numbers from the front of the bytes: small ones mostly, and some that overflow when they are multiplied.
struct Source<'a>(&'a [u8]);

impl Source<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn size(&mut self) -> usize {
        match self.byte() {
            n @ 0..=239 => usize::from(n),
            n @ 240..=251 => 1 << (5 * (u32::from(n) - 239)),
            252 => usize::MAX,
            253 => isize::MAX.unsigned_abs(),
            254 => u32::MAX as usize,
            _ => usize::MAX / 2 + 1,
        }
    }

    fn words<const N: usize, T>(&mut self, make: fn([u8; N]) -> T) -> Vec<T> {
        std::mem::take(&mut self.0).as_chunks::<N>().0.iter().map(|c| make(*c)).collect()
    }
}

/// Dense bitstreams.
pub fn dense(data: &[u8]) {
    let mut source = Source(data);
    let (rows, dim, bits) = (source.size(), source.size(), u32::from(source.byte() % 10));
    let words = source.words(u32::from_le_bytes);
    if let Ok(codes) = dense::unpack(&words, rows, dim, bits) {
        assert_eq!(codes.len(), rows * dim);
        assert!(codes.iter().all(|&c| u32::from(c) < 1 << bits));
    }
}

/// The Marlin layout.
pub fn marlin(data: &[u8]) {
    let mut source = Source(data);
    let (k, n) = (source.size(), source.size());
    let words = source.words(u32::from_le_bytes);
    if let Ok(codes) = marlin::unpack(&words, k, n) {
        assert_eq!(codes.len(), k * n);
        assert_eq!(marlin::pack(&codes, k, n).ok(), Some(words));
    }
}

/// The layout of the INT4 kernel.
pub fn w4(data: &[u8]) {
    let mut source = Source(data);
    let (n, k) = (source.size(), source.size());
    let words = source.words(u32::from_le_bytes);
    let cancel = Cancel::default();
    let execution = Execution { threads: 1, cancel: &cancel };
    if let Ok(codes) = w4::unpack(&words, n, k, &execution) {
        assert_eq!(codes.len(), n * k);
    }
}

/// The exact state of a Hessian.
pub fn state(data: &[u8]) {
    let mut source = Source(data);
    let spec_version = i64::from(source.byte() % 3);
    let dim = source.size();
    let steps = (0..source.byte() % 4).map(|_| source.size()).collect::<Vec<_>>();
    let n_rows = (0..source.byte() % 4).map(|_| source.size() as u64).collect();
    let (per_step, n_matrices) = (source.byte() % 2 == 1, usize::from(source.byte() % 4));
    let limbs = source.words(i64::from_le_bytes);
    let matrices = (0..n_matrices).map(|i| {
        let part =
            |j: usize| Cow::Owned(limbs.iter().skip(2 * i + j).step_by(2 * n_matrices).copied().collect());
        MatrixState { hi: part(0), lo: part(1) }
    });
    let state = State { spec_version, dim, steps, per_step, n_rows, matrices: matrices.collect() };
    let cancel = Cancel::default();
    if let Ok(made) = Accumulator::from_state(&state, 1, &cancel) {
        assert_eq!(made.state(&cancel).ok(), Some(state));
    }
}

/// A safetensors file of rows.
#[allow(unsafe_code)] // a file is mapped
pub fn rows(data: &[u8]) {
    let place = PathBuf::from(if cfg!(target_os = "linux") { "/dev/shm" } else { "." });
    let folder = if place.is_dir() { place } else { env::temp_dir() };
    let path = folder.join(format!("loopq-fuzz-{}-{:?}", process::id(), std::thread::current().id()));
    let mut source = Source(data);
    let dim = usize::from(source.byte() % 9);
    // Half of the files have a header of the length that they say: random bytes alone never come further than that.
    let content = if source.byte() % 2 == 0 {
        source.0.to_vec()
    } else {
        let end = source.0.iter().position(|&b| b == b'\0').unwrap_or(source.0.len());
        let (header, rest) = source.0.split_at(end);
        [&(header.len() as u64).to_le_bytes(), header, rest.get(1..).unwrap_or(&[])].concat()
    };
    let settings =
        Settings { dim: dim.max(1), steps: vec![0], per_step: false, threads: 1, isa: Isa::best() };
    if fs::write(&path, content).is_ok() {
        if let Ok(mut accumulator) = Accumulator::new(settings) {
            let cancel = Cancel::default();
            // SAFETY: nobody else knows of the file.
            let read = unsafe { accumulator.update_file(0, &path, "x/0", &cancel) };
            assert!(read.is_err() || accumulator.finish(&cancel).is_ok());
        }
    }
    let _ = fs::remove_file(&path);
}
