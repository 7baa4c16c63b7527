//! Long calls: they release the interpreter lock (GIL), answer Ctrl-C, and turn errors into exceptions.

use std::sync::mpsc::{sync_channel, RecvTimeoutError};
use std::time::Duration;

use loopq_core::error::Kind;
use loopq_core::{Cancel, Error};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::reserve;

/// How often signals are looked for.
const TICK: Duration = Duration::from_millis(100);

/// The exception of `loopq.errors` that a core error becomes.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let class = match error.kind() {
        Kind::Config => "ConfigError",
        Kind::NonFinite => "NonFiniteError",
        Kind::Dump => "DumpError",
        Kind::Solve => "SolveError",
        Kind::Memory => "OutOfMemoryError",
        Kind::Interrupted => return PyKeyboardInterrupt::new_err("interrupted"),
    };
    let made =
        py.import("loopq.errors").and_then(|m| m.getattr(class)).and_then(|c| c.call1((error.to_string(),)));
    match made {
        Ok(value) => PyErr::from_value(value),
        Err(failed) => failed,
    }
}

/// Runs `work` on another thread without the interpreter lock, while this thread watches for signals.
pub(crate) fn allow_threads<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&Cancel) -> Result<T, Error> + Send,
) -> PyResult<T> {
    reserve::fill().map_err(|e| raise(py, &e))?;
    let cancel = Cancel::new();
    let (outcome, raised) = py.detach(|| {
        std::thread::scope(|scope| {
            let (sender, receiver) = sync_channel(1);
            let flag = &cancel;
            let task = move || {
                // The receiver waits until it has got this, so sending cannot fail.
                let _ = sender.send(work(flag));
            };
            if let Err(e) = std::thread::Builder::new().spawn_scoped(scope, task) {
                return (Some(Err(Error::Threads { threads: 1, reason: e.to_string() })), None);
            }
            let mut raised: Option<PyErr> = None;
            loop {
                match receiver.recv_timeout(TICK) {
                    Ok(result) => return (Some(result), raised),
                    Err(RecvTimeoutError::Disconnected) => return (None, raised),
                    Err(RecvTimeoutError::Timeout) if raised.is_none() => {
                        // The method itself is not general enough in its lifetime.
                        #[expect(clippy::redundant_closure_for_method_calls)]
                        let signal = Python::attach(|py| py.check_signals());
                        raised = signal.err();
                        if raised.is_some() {
                            cancel.cancel();
                        }
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
            }
        })
    });
    if let Some(raised) = raised {
        return Err(raised);
    }
    match outcome {
        Some(result) => result.map_err(|e| raise(py, &e)),
        // Only a panic in the core gets here; std has printed it.
        None => Err(pyo3::panic::PanicException::new_err("the core panicked; please report this")),
    }
}
