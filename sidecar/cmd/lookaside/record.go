package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
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
		parts   partSettings
		partMax string
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
engine that computes 10,000 tokens a second in blocks of 16 writes some 18 MB an hour.

To record for long, have it begin a new file now and then: by --rotate-size, by --rotate-every, or
by both, whichever is first. FILE requests.lkt then becomes requests.000001.lkt and so on; files
that are there stay, and the numbers go on after theirs. --keep removes the oldest beyond so many.
Each file can be read alone; lookaside simulate joins those of one recording. Without --size such a
recording has no limit.`,
		Example: `  lookaside record --rotate-every 24h --keep 7 requests.lkt
  lookaside simulate requests.*.lkt
  lookaside record --for 1h requests.lkt
  lookaside simulate requests.lkt
  lookaside simulate requests.lkt --memory 32G,64G,128G --tier 0,500G`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			most, err := bytesize.Parse(limit)
			if err != nil || most <= 0 {
				return fmt.Errorf("--size %s: want a size such as 1G", limit)
			}
			if partMax != "" {
				if parts.size, err = bytesize.Parse(partMax); err != nil || parts.size <= 0 {
					return fmt.Errorf("--rotate-size %s: want a size such as 256M", partMax)
				}
			}
			switch {
			case parts.every < 0:
				return fmt.Errorf("--rotate-every %s: want a time such as 24h", parts.every)
			case parts.keep < 0 || parts.keep > 0 && !parts.on():
				return fmt.Errorf("--keep %d: want a number of files, with --rotate-size or --rotate-every", parts.keep)
			case parts.on() && replace:
				return errors.New("--replace is not for several files: they are numbered on")
			case parts.on() && !cmd.Flags().Changed("size"):
				most = math.MaxInt64
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
			r := recorder{client: client, limit: most, parts: parts, done: interrupted.Done()}
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
	f.StringVar(&partMax, "rotate-size", "", "begin a new file when one has so many `bytes`, such as 256M")
	f.DurationVar(&parts.every, "rotate-every", 0, "begin a new file after this `time`, such as 24h")
	f.IntVar(&parts.keep, "keep", 0, "keep so many `files`, the newest; 0: all")
	f.BoolVar(&replace, "replace", false, "replace a file that is there")
	c.flags(cmd)
	return cmd
}

// recordSummary is what a recording has.
type recordSummary struct {
	File string `json:"file"`
	// Files has the files, if there are several. Those that --keep has removed are not in it.
	Files   []string `json:"files,omitempty"`
	Bytes   int64    `json:"bytes"`
	Seconds float64  `json:"seconds"` // from its first request to its last
	Lookups int      `json:"lookups"`
	Stores  int      `json:"stores"`
	Pages   int      `json:"pages"` // looked up
	Held    int      `json:"held_pages"`
	Dropped uint64   `json:"dropped_requests"`
}

func (s *recordSummary) write(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%s: %s, %d lookups of %d pages, of which %d were found, and %d stores in %s\n",
		cmp.Or(strings.Join(s.Files, ", "), s.File), bytesize.Format(s.Bytes), s.Lookups, s.Pages,
		s.Held, s.Stores,
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
	parts  partSettings
	done   <-chan struct{} // ends the recording
	begun  func()          // called when the sidecar records

	Summary recordSummary
	path    string

	mu sync.Mutex // guards the rest
	// The file that is written. due is set when its time is over: the next request begins another.
	file  *os.File
	out   *recording.Compressed
	begin time.Time
	due   bool
	// Of the recording: the bytes of the files before, its spaces so far, which part this is of
	// which, and the number in the file's name.
	before int64
	spaces []recording.Space
	part   recording.Part
	number int
	buf    []byte
}

// partSettings says when a new file is begun, and how many stay.
type partSettings struct {
	size  int64         // 0: at no size
	every time.Duration // 0: at no time
	keep  int           // 0: all
}

func (p *partSettings) on() bool { return p.size > 0 || p.every > 0 }

// partName returns the name of a file of a recording: FILE with its number before the extension.
func partName(path string, number int) string {
	ext := filepath.Ext(path)
	return fmt.Sprintf("%s.%06d%s", strings.TrimSuffix(path, ext), number, ext)
}

// numbered returns the numbers of the files that there are, in their order.
func numbered(path string) (numbers []int) {
	ext := filepath.Ext(path)
	base := strings.TrimSuffix(filepath.Base(path), ext) + "."
	list, _ := os.ReadDir(filepath.Dir(path))
	for _, e := range list {
		rest, begins := strings.CutPrefix(e.Name(), base)
		digits, ends := strings.CutSuffix(rest, ext)
		if n, err := strconv.Atoi(digits); begins && ends && err == nil && n > 0 &&
			filepath.Base(partName(path, n)) == e.Name() {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers
}

// open makes the first file.
func (r *recorder) open(path string, replace bool) (err error) {
	r.Summary.File, r.path = path, path
	if r.parts.on() {
		if numbers := numbered(path); len(numbers) > 0 {
			r.number = numbers[len(numbers)-1]
		}
		r.part.ID = rand.Uint64()
		return r.next()
	}
	flags := os.O_WRONLY | os.O_CREATE | os.O_EXCL
	if replace {
		flags = os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	}
	if r.file, err = os.OpenFile(path, flags, 0o600); errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s is there already: choose another name, or --replace it", path)
	}
	return err
}

// next makes the file of the next part. The caller holds r.mu, or is the only one.
func (r *recorder) next() (err error) {
	r.number++
	r.part.Number++
	name := partName(r.path, r.number)
	if r.file, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return err
	}
	r.Summary.Files = append(r.Summary.Files, name)
	if r.parts.keep == 0 {
		return nil
	}
	numbers := numbered(r.path)
	for _, n := range numbers[:max(0, len(numbers)-r.parts.keep)] {
		old := partName(r.path, n)
		if err := os.Remove(old); err != nil {
			return err
		}
		r.Summary.Files = slices.DeleteFunc(r.Summary.Files,
			func(name string) bool { return name == old })
	}
	return nil
}

// start writes what a file begins with: the spaces so far are in each.
func (r *recorder) start() (err error) {
	if r.out, err = recording.Compress(r.file); err != nil {
		return err
	}
	r.begin, r.due = time.Now(), false
	b := recording.AppendStart(r.buf[:0])
	if r.parts.on() {
		b = recording.Append(b, &recording.Record{Kind: recording.KindPart, Part: r.part})
	}
	for _, s := range r.spaces {
		b = recording.Append(b, &recording.Record{Kind: recording.KindSpace, Space: s})
	}
	r.buf = b
	_, err = r.out.Write(b)
	return err
}

// finish ends the file, with its last record if it is whole.
func (r *recorder) finish(whole bool) error {
	var err error
	if r.out != nil {
		if whole {
			_, err = r.out.Write(recording.Append(r.buf[:0],
				&recording.Record{Kind: recording.KindEnd}))
		}
		err = errors.Join(err, r.out.Close())
	}
	err = errors.Join(err, r.file.Sync())
	if st, e := r.file.Stat(); e == nil {
		r.before += st.Size()
	}
	return errors.Join(err, r.file.Close())
}

// put writes a record, to a new file if one is due.
func (r *recorder) put(rec *recording.Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.due && (rec.Kind == recording.KindLookup || rec.Kind == recording.KindStore) {
		if err := r.finish(true); err != nil {
			return err
		}
		if err := r.next(); err != nil {
			return err
		}
		if err := r.start(); err != nil {
			return err
		}
	}
	if rec.Kind == recording.KindSpace {
		r.spaces = append(r.spaces, rec.Space)
	}
	r.buf = recording.Append(r.buf[:0], rec)
	_, err := r.out.Write(r.buf)
	return err
}

// flush writes out what there is, and returns the size of all files. It notes when a new file is
// due.
func (r *recorder) flush() (int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := r.out.Flush()
	size := r.out.Size()
	r.due = r.parts.size > 0 && size >= r.parts.size ||
		r.parts.every > 0 && time.Since(r.begin) >= r.parts.every
	return r.before + size, err
}

// run records until done, or until the files are as large as they may be, and closes the file.
func (r *recorder) run(ctx context.Context) (err error) {
	whole := false
	defer func() {
		err = errors.Join(err, r.finish(whole))
		r.Summary.Bytes = r.before
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, number, err := r.client.Record(ctx)
	if err != nil {
		return errors.Join(err, os.Remove(r.file.Name()))
	}
	defer stream.Close()
	if err := r.start(); err != nil {
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
	err = r.read(stream)
	whole = err == nil
	close(over)
	flusher.Wait()
	if flushErr != nil {
		err = flushErr
	}
	return err
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
		if err := r.put(&rec); err != nil {
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
