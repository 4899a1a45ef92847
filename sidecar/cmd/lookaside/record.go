package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"lookaside/internal/bytesize"
	"lookaside/internal/recording"
	"lookaside/sidecar/admin"
)

func newRecord() *cobra.Command {
	var (
		c       control
		limit   string
		atMost  time.Duration
		replace bool
	)
	cmd := &cobra.Command{
		Use:   "record FILE",
		Short: "Record which prefixes are asked for, to simulate other sizes and tiers with them",
		Long: `Record which prefixes clients of a sidecar look up and store, and when, for lookaside simulate: it
answers how much memory and which tiers would help these requests.

The file has no tokens, no text, and none of vLLM's hashes. It has a number for each page (the
tokens of one block), made from the page's hash by a random key that is made for this recording and
written nowhere. So it tells how many requests there were, when, how long they were, and which of
them begin alike; not what is in them. The form is described in docs/traces.md.

Recording does not slow lookups down: what cannot be written in time is left out and counted. It
ends with Ctrl-C, after --for, or when the file has reached --size, whichever is first, and nothing
that came before is lost. If the command is killed, the file lacks at most the last second and can
be used. A page takes some 8 bytes when it is first asked for, and nearly nothing after that: an
engine that computes 10,000 tokens a second in blocks of 16 writes some 18 MB an hour.`,
		Example: `  lookaside record --for 1h requests.lkt
  lookaside simulate requests.lkt
  lookaside simulate requests.lkt --memory 32G,64G,128G --tier 0,500G`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			most, err := bytesize.Parse(limit)
			if err != nil || most <= 0 {
				return fmt.Errorf("--size %s: want a size such as 1G", limit)
			}
			if atMost < 0 {
				return fmt.Errorf("--for %s: want a time such as 1h, or 0 for no limit", atMost)
			}
			client, err := c.client(cmd)
			if err != nil {
				return err
			}
			interrupted, restore := signal.NotifyContext(cmd.Context(), os.Interrupt,
				syscall.SIGTERM)
			defer restore()
			if atMost > 0 {
				var cancel context.CancelFunc
				interrupted, cancel = context.WithTimeout(interrupted, atMost)
				defer cancel()
			}
			// After the first signal a second one kills.
			context.AfterFunc(interrupted, restore)
			r := recorder{client: client, limit: most, done: interrupted.Done()}
			if err := r.open(args[0], replace); err != nil {
				return err
			}
			r.begun = func() {
				fmt.Fprintf(cmd.ErrOrStderr(), "recording the requests of %s to %s; Ctrl-C ends it\n",
					c.cfg.Runtime.Dir, args[0])
			}
			err = r.run(context.WithoutCancel(cmd.Context()))
			if r.out == nil { // nothing was recorded
				return err
			}
			return errors.Join(err, c.print(cmd, &r.Summary, r.Summary.write))
		},
	}
	f := cmd.Flags()
	f.DurationVar(&atMost, "for", 0, "end after this `time`, such as 1h; 0: no limit")
	f.StringVar(&limit, "size", "1G", "end when the file has so many `bytes`")
	f.BoolVar(&replace, "replace", false, "replace a file that is there")
	c.flags(cmd)
	return cmd
}

// recordSummary is what a recording has.
type recordSummary struct {
	File    string  `json:"file"`
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"` // from its first request to its last
	Lookups int     `json:"lookups"`
	Stores  int     `json:"stores"`
	Pages   int     `json:"pages"` // looked up
	Held    int     `json:"held_pages"`
	Dropped uint64  `json:"dropped_requests"`
}

func (s *recordSummary) write(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%s: %s, %d lookups of %d pages, of which %d were found, and %d stores in %s\n",
		s.File, bytesize.Format(s.Bytes), s.Lookups, s.Pages, s.Held, s.Stores,
		time.Duration(s.Seconds*float64(time.Second)).Round(time.Millisecond))
	if err == nil && s.Dropped > 0 {
		_, err = fmt.Fprintf(w, "%d requests are missing, because there was no time for them\n",
			s.Dropped)
	}
	return err
}

// recorder writes a recording to a file.
type recorder struct {
	client *admin.Client
	limit  int64
	done   <-chan struct{} // ends the recording
	begun  func()          // called when the sidecar records

	Summary recordSummary
	file    *os.File

	mu  sync.Mutex
	out *recording.Compressed // guarded by mu
}

// open makes the file.
func (r *recorder) open(path string, replace bool) (err error) {
	flags := os.O_WRONLY | os.O_CREATE | os.O_EXCL
	if replace {
		flags = os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	}
	r.Summary.File = path
	if r.file, err = os.OpenFile(path, flags, 0o600); errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s is there already: choose another name, or --replace it", path)
	}
	return err
}

// Write implements io.Writer: it writes a part of the stream.
func (r *recorder) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.out.Write(b)
}

// flush writes out what there is, and returns the size of the file.
func (r *recorder) flush() (int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := r.out.Flush()
	return r.out.Size(), err
}

// run records until done, or until the file is as large as it may be, and closes the file.
func (r *recorder) run(ctx context.Context) (err error) {
	defer func() {
		err = errors.Join(err, r.file.Sync())
		if st, e := r.file.Stat(); e == nil {
			r.Summary.Bytes = st.Size()
		}
		err = errors.Join(err, r.file.Close())
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, number, err := r.client.Record(ctx)
	if err != nil {
		return errors.Join(err, os.Remove(r.file.Name()))
	}
	defer stream.Close()
	if r.out, err = recording.Compress(r.file); err != nil {
		return err
	}
	r.begun()
	var flusher sync.WaitGroup
	over := make(chan struct{})
	var flushErr error
	flusher.Go(func() {
		if flushErr = r.watch(ctx, number, over); flushErr != nil {
			cancel()
		}
	})
	err = r.read(io.TeeReader(stream, r))
	close(over)
	flusher.Wait()
	if flushErr != nil {
		err = flushErr
	}
	return errors.Join(err, r.out.Close())
}

// stopPatience is how long the sidecar may take to end a recording.
const stopPatience = 10 * time.Second

// watch flushes the file every second, and has the sidecar end the recording in time.
func (r *recorder) watch(ctx context.Context, number int, over <-chan struct{}) error {
	every := time.NewTicker(time.Second)
	defer every.Stop()
	for full := false; !full; {
		select {
		case <-over:
			return nil
		case <-r.done:
			full = true
		case <-every.C:
			size, err := r.flush()
			if err != nil {
				return err
			}
			full = size >= r.limit
		}
	}
	ctx, cancel := context.WithTimeout(ctx, stopPatience)
	defer cancel()
	if err := r.client.Post(ctx, "/v1/record/stop", admin.StopRecordingRequest{Recording: number},
		&admin.StopRecordingResult{}); err != nil {
		select {
		case <-over: // it had ended by itself
			return nil
		default:
			return fmt.Errorf("the recording could not be ended in order: %w", err)
		}
	}
	select {
	case <-over:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the sidecar has not ended the recording within %s", stopPatience)
	}
}

// read reads the stream to its end, and counts.
func (r *recorder) read(stream io.Reader) error {
	in := recording.NewReader(stream)
	s := &r.Summary
	var rec recording.Record
	for {
		err := in.Next(&rec)
		switch {
		case err == io.EOF:
			_, err = io.Copy(io.Discard, stream)
			return err
		case errors.Is(err, recording.ErrCut):
			return errors.New("the sidecar ended in the middle; what came until then is in the file")
		case err != nil:
			return err
		}
		switch rec.Kind {
		case recording.KindDropped:
			s.Dropped += rec.Dropped
			continue
		case recording.KindLookup:
			s.Lookups++
			s.Pages += len(rec.Pages)
			s.Held += rec.Held
		case recording.KindStore:
			s.Stores++
		default:
			continue
		}
		if s.Lookups+s.Stores > 1 {
			s.Seconds += float64(rec.AfterMs) / 1000
		}
	}
}
