//! The accumulator: rows in, exact sums out.
//!
//! Rows wait, in their own type, until a whole block of 512 is there. It is packed and its products are added. More
//! blocks at once would be no faster, and a model has hundreds of accumulators. Rows that could leave the exact grid
//! are refused before anything is changed. For that, an upper bound on every entry is kept for the sums and for the
//! waiting rows. When the bound nears the limit, the true largest entry replaces it.

use std::path::Path;

use rayon::prelude::*;

use crate::dump::{MappedFile, RowType, Rows};
use crate::hessian::bf16;
use crate::hessian::matrix::ExactMatrix;
use crate::hessian::packed::PackedBlock;
use crate::hessian::rows::check;
use crate::hessian::{BLOCK_ROWS, SUM_LIMIT};
use crate::memory::{extend, Buffer};
use crate::simd::Isa;
use crate::{dims, Cancel, Error, Execution, Result};

/// Bytes of packed rows added in one pass.
const PASS_BYTES: usize = 192 << 20;
/// Blocks that one pass is cut to at most.
const PASS_BLOCKS: usize = 16;
/// Words of a cache line.
const CACHE_LINE: usize = 16;

/// Settings of an accumulator.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Columns of a row.
    pub dim: usize,
    /// The loop steps that will come; each once, ascending.
    pub steps: Vec<usize>,
    /// One Hessian per step, or only their sum.
    pub per_step: bool,
    /// Threads; 0 for all.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
}

impl Settings {
    /// Refuses a width of zero and steps that are not ascending.
    pub(super) fn check(&self) -> Result<()> {
        if self.dim == 0 {
            return Err(Error::setting("dim", 0, "1 or more"));
        }
        if self.steps.is_empty() || self.steps.windows(2).any(|w| w[0] >= w[1]) {
            let got = format!("{:?}", self.steps);
            return Err(Error::setting("steps", got, "one or more, ascending, each once"));
        }
        Ok(())
    }
}

/// Rows of one step that wait for their block to fill.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    bytes: Vec<u8>,
    pub(super) n_rows: u64,
    /// An upper bound on what the step's rows in the sums have added to any entry.
    pub(super) bound: f64,
    /// The same for the rows in `bytes`, which no sum holds yet.
    pub(super) bound_waiting: f64,
}

impl Waiting {
    /// Keeps rows of at most `top` in magnitude for later.
    fn keep(&mut self, rows: Rows<'_>, top: f64) -> Result<()> {
        extend("rows that wait for their block to fill", &mut self.bytes, rows.bytes())?;
        self.bound_waiting += rows.n_rows() as f64 * top * top;
        Ok(())
    }
}

/// Streaming `X^T X` per step.
#[derive(Debug)]
pub struct Accumulator {
    pub(super) settings: Settings,
    pub(super) matrices: Vec<ExactMatrix>,
    pub(super) waiting: Vec<Waiting>,
    dtype: Option<RowType>,
    finished: bool,
    /// Set while blocks are added: still set later if that was interrupted, and then the sums are not whole.
    pub(super) broken: bool,
}

impl Accumulator {
    /// An empty accumulator.
    pub fn new(settings: Settings) -> Result<Self> {
        settings.check()?;
        let n_matrices = if settings.per_step { settings.steps.len() } else { 1 };
        let zeros = || (0..n_matrices).map(|_| ExactMatrix::zeros(settings.dim)).collect::<Result<_>>();
        let matrices = zeros()?;
        let waiting = settings.steps.iter().map(|_| Waiting::default()).collect();
        Ok(Self { settings, matrices, waiting, dtype: None, finished: false, broken: false })
    }

    /// The settings it was made with.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether [`Accumulator::finish`] was called.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Rows seen in a step.
    pub fn n_rows(&self, step: usize) -> Result<u64> {
        Ok(self.waiting[self.index_of(step)?].n_rows)
    }

    pub(super) fn index_of(&self, step: usize) -> Result<usize> {
        let steps = &self.settings.steps;
        steps.binary_search(&step).map_err(|_| Error::UnknownStep { step, steps: steps.clone() })
    }

    /// Adds rows to a step. A refused call changes nothing.
    pub fn update(&mut self, step: usize, rows: Rows<'_>, cancel: &Cancel) -> Result<()> {
        let execution = Execution { threads: self.settings.threads, cancel };
        let at = self.index_of(step)?;
        let top = self.check_rows(at, rows, &execution)?;
        self.add(at, rows, top, &execution)
    }

    /// Adds the rows of a tensor of a safetensors file, which is mapped, not read. An error names both.
    ///
    /// # Safety
    /// As [`MappedFile::open`]: nobody writes to the file or cuts it short before the call ends.
    #[allow(unsafe_code)] // as above
    pub unsafe fn update_file(
        &mut self,
        step: usize,
        path: &Path,
        tensor: &str,
        cancel: &Cancel,
    ) -> Result<()> {
        // SAFETY: the map ends with this call, and the caller promises that the file does not change before that.
        let file = unsafe { MappedFile::open(path) }?;
        let rows = file.rows(path, tensor, self.settings.dim)?;
        self.update(step, rows, cancel).map_err(|e| match e {
            Error::Interrupted => e,
            other => Error::InTensor { path: path.into(), tensor: tensor.into(), source: Box::new(other) },
        })
    }

    /// Refuses what cannot be added, before anything is changed; returns the rows' largest magnitude.
    fn check_rows(&mut self, at: usize, rows: Rows<'_>, execution: &Execution<'_>) -> Result<f64> {
        self.check_whole()?;
        if self.finished {
            return Err(Error::Finished);
        }
        if rows.dim() != self.settings.dim {
            return Err(Error::shape("columns of the rows", self.settings.dim, rows.dim()));
        }
        if let Some(first) = self.dtype.filter(|&first| first != rows.dtype()) {
            return Err(Error::RowType { first: first.name(), got: rows.dtype().name() });
        }
        let step = self.settings.steps[at];
        let top = self.largest(rows, step, self.waiting[at].n_rows, execution)?;
        self.reserve(rows.n_rows() as f64 * top * top, at)?;
        self.dtype = Some(rows.dtype());
        Ok(top)
    }

    /// Refuses what could make any entry leave the grid by growing by `grown`.
    fn reserve(&mut self, grown: f64, at: usize) -> Result<()> {
        if self.bound() + grown > SUM_LIMIT {
            self.tighten();
            if self.bound() + grown > SUM_LIMIT {
                let (step, rows) = (self.settings.steps[at], self.waiting[at].n_rows);
                return Err(Error::SumTooLarge { step, rows, limit: SUM_LIMIT });
            }
        }
        Ok(())
    }

    /// The largest magnitude of rows, `first` rows into their step; refuses what is no row of a Hessian.
    fn largest(&self, rows: Rows<'_>, step: usize, first: u64, execution: &Execution<'_>) -> Result<f64> {
        let (chunks, isa) = (rows.n_rows().div_ceil(BLOCK_ROWS), self.settings.isa);
        let tops: Vec<Result<f64>> = execution.pool()?.install(|| {
            (0..chunks)
                .into_par_iter()
                .map(|c| {
                    let from = c * BLOCK_ROWS;
                    let n = BLOCK_ROWS.min(rows.n_rows() - from);
                    check(rows.slice(from, n), isa, step, first + from as u64)
                })
                .collect()
        });
        tops.into_iter().try_fold(0.0, |top: f64, next| Ok(top.max(next?)))
    }

    /// Bound on every entry of every sum, also of the sum over steps.
    pub(super) fn bound(&self) -> f64 {
        self.waiting.iter().map(|w| w.bound + w.bound_waiting).sum()
    }

    /// Replaces the bounds of rows in the sums by the largest entry that the sums really hold.
    pub(super) fn tighten(&mut self) {
        let per_step = self.settings.per_step;
        for (i, waiting) in self.waiting.iter_mut().enumerate() {
            let matrix =
                if per_step { self.matrices.get(i) } else { self.matrices.first().filter(|_| i == 0) };
            waiting.bound = matrix.map_or(0.0, ExactMatrix::top);
        }
    }

    /// Adds rows of at most `top` in magnitude. A failure half-way leaves incomplete sums and marks them as such.
    fn add(&mut self, at: usize, rows: Rows<'_>, top: f64, execution: &Execution<'_>) -> Result<()> {
        let before = self.waiting[at].n_rows;
        let added = self.add_or_keep(at, rows, top, execution);
        self.broken |= added.is_err() && self.waiting[at].n_rows != before;
        added
    }

    /// Adds whole blocks, and keeps other rows until their block is full.
    fn add_or_keep(
        &mut self,
        at: usize,
        mut rows: Rows<'_>,
        top: f64,
        execution: &Execution<'_>,
    ) -> Result<()> {
        while rows.n_rows() > 0 {
            let held = self.waiting[at].bytes.len() / rows.row_bytes();
            let n = if held == 0 && rows.n_rows() >= BLOCK_ROWS {
                let whole = rows.n_rows() / BLOCK_ROWS * BLOCK_ROWS;
                self.add_blocks(at, rows.slice(0, whole), execution)?;
                self.waiting[at].bound += whole as f64 * top * top;
                whole
            } else {
                let n = rows.n_rows().min(BLOCK_ROWS - held);
                self.waiting[at].keep(rows.slice(0, n), top)?;
                n
            };
            self.waiting[at].n_rows += n as u64;
            if self.waiting[at].bytes.len() == BLOCK_ROWS * rows.row_bytes() {
                self.flush(at, execution)?;
            }
            rows = rows.slice(n, rows.n_rows() - n);
        }
        Ok(())
    }

    /// Adds everything that waits in a step.
    fn flush(&mut self, at: usize, execution: &Execution<'_>) -> Result<()> {
        let Some(dtype) = self.dtype else {
            return Ok(());
        };
        let mut bytes = std::mem::take(&mut self.waiting[at].bytes);
        let n = bytes.len() / (dtype.size() * self.settings.dim);
        let result = Rows::new(&bytes, dtype, n, self.settings.dim)
            .and_then(|rows| self.add_blocks(at, rows, execution));
        bytes.clear();
        self.broken |= result.is_err();
        let waiting = &mut self.waiting[at];
        waiting.bytes = bytes;
        waiting.bound += std::mem::take(&mut waiting.bound_waiting);
        result
    }

    /// Adds the products of rows; the last block may be short.
    fn add_blocks(&mut self, at: usize, rows: Rows<'_>, execution: &Execution<'_>) -> Result<()> {
        let Settings { dim, per_step, isa, .. } = self.settings;
        let layout = bf16::layout(rows.dtype(), isa);
        let words = layout.n_words(dim);
        let pass = (PASS_BYTES / dims::product("a block of rows", words, 4)?).clamp(1, PASS_BLOCKS);
        let blocks = pass.min(rows.n_rows().div_ceil(BLOCK_ROWS));
        // Kept from pass to pass, but not between calls: a model has hundreds of accumulators.
        let room = dims::product("packed rows", blocks, words)? + CACHE_LINE;
        let mut packed = Buffer::<u32>::zeroed("packed rows", room)?;
        let start = packed.as_ptr().align_offset(4 * CACHE_LINE).min(CACHE_LINE);
        let matrix = &mut self.matrices[if per_step { at } else { 0 }];
        self.broken = true;
        let mut from = 0;
        while from < rows.n_rows() {
            let n = (pass * BLOCK_ROWS).min(rows.n_rows() - from);
            let blocks: Vec<PackedBlock<'_>> = execution.pool()?.install(|| {
                packed[start..]
                    .par_chunks_mut(words)
                    .take(n.div_ceil(BLOCK_ROWS))
                    .enumerate()
                    .map(|(b, scratch)| {
                        let start = b * BLOCK_ROWS;
                        let rows = rows.slice(from + start, BLOCK_ROWS.min(n - start));
                        PackedBlock::pack(rows, layout, isa, scratch)
                    })
                    .collect()
            });
            matrix.add_blocks(&blocks, isa, execution)?;
            from += n;
        }
        self.broken = false;
        Ok(())
    }

    /// Adds all partial blocks. Further calls do nothing.
    pub fn finish(&mut self, cancel: &Cancel) -> Result<()> {
        self.check_whole()?;
        if self.finished {
            return Ok(());
        }
        let execution = Execution { threads: self.settings.threads, cancel };
        for at in 0..self.waiting.len() {
            self.flush(at, &execution)?;
            self.waiting[at].bytes = Vec::new();
        }
        self.finished = true;
        Ok(())
    }

    fn check_whole(&self) -> Result<()> {
        if self.broken {
            return Err(Error::Broken);
        }
        Ok(())
    }

    pub(super) fn check_finished(&self) -> Result<()> {
        self.check_whole()?;
        if self.finished {
            return Ok(());
        }
        Err(Error::NotFinished)
    }

    /// Rebuilds a finished accumulator from its parts, which have been checked.
    pub(super) fn restore(settings: Settings, matrices: Vec<ExactMatrix>, n_rows: &[u64]) -> Self {
        let waiting = n_rows.iter().map(|&n_rows| Waiting { n_rows, ..Waiting::default() }).collect();
        let mut made = Self { settings, matrices, waiting, dtype: None, finished: true, broken: false };
        made.tighten();
        made
    }
}
