package source

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
)

// shown is the redaction where there is no token.
func shown(text string) string { return text }

// kernel is a kernelspec as the gateway sends it, with this metadata.
func kernel(metadata string) string {
	return `{"name":"k","spec":{"argv":["python"],"env":{},"display_name":"K","language":"python","interrupt_mode":"signal",` +
		`"metadata":` + metadata + `},"resources":{"logo-64x64":"/kernelspecs/k/logo-64x64.png"}}`
}

// proxy and provisioner are metadata with this config.
func proxy(config string) string {
	return `{"process_proxy":{"class_name":"enterprise_gateway.services.processproxies.k8s.KubernetesProcessProxy","config":` + config + `}}`
}

func provisioner(config string) string {
	return `{"kernel_provisioner":{"provisioner_name":"kubernetes-provisioner","config":` + config + `}}`
}

// both is metadata with both stanzas, each of any shape.
func both(processProxy, kernelProvisioner string) string {
	return `{"process_proxy":` + processProxy + `,"kernel_provisioner":` + kernelProvisioner + `}`
}

func image(name string) string {
	text, _ := json.Marshal(name)
	return `{"image_name":` + string(text) + `}`
}

// shapes are single kernelspecs.
var shapes = []struct {
	name   string
	spec   string
	images []string
	fault  string // empty: no warning
}{
	{"a process proxy names an image", kernel(proxy(image("a:1"))), []string{"a:1"}, ""},
	{"a provisioner names an image", kernel(provisioner(image("a:1"))), []string{"a:1"}, ""},
	{"the executor's image comes second", kernel(proxy(`{"executor_image_name":"e:1","image_name":"a:1"}`)), []string{"a:1", "e:1"}, ""},
	{"an executor's image alone is used", kernel(proxy(`{"executor_image_name":"e:1"}`)), []string{"e:1"}, ""},
	{"one image for both is named once", kernel(proxy(`{"image_name":"a:1","executor_image_name":"a:1"}`)), []string{"a:1"}, ""},

	{"of both stanzas the process proxy is used",
		kernel(both(`{"config":{"image_name":"a:1"}}`, `{"config":{"image_name":"b:1","executor_image_name":"c:1"}}`)), []string{"a:1"}, ""},
	{"a process proxy without images leaves it to the provisioner",
		kernel(both(`{"config":{"port_range":"0..0"}}`, `{"config":{"image_name":"b:1"}}`)), []string{"b:1"}, ""},
	{"a process proxy without config leaves it to the provisioner",
		kernel(both(`{"class_name":"x"}`, `{"config":{"image_name":"b:1"}}`)), []string{"b:1"}, ""},
	{"a null process proxy leaves it to the provisioner, with a warning",
		kernel(both(`null`, `{"config":{"image_name":"b:1"}}`)), []string{"b:1"}, "process_proxy is null, not an object"},
	{"a process proxy with a null config leaves it to the provisioner, with a warning",
		kernel(both(`{"config":null}`, `{"config":{"image_name":"b:1"}}`)), []string{"b:1"}, "process_proxy.config is null, not an object"},
	{"a process proxy with a bad image leaves it to the provisioner, with a warning",
		kernel(both(`{"config":{"image_name":7}}`, `{"config":{"image_name":"b:1"}}`)), []string{"b:1"}, "process_proxy.config.image_name is a number, not a string"},
	{"a provisioner that is not used is not judged",
		kernel(both(`{"config":{"image_name":"a:1"}}`, `7`)), []string{"a:1"}, ""},

	{"a local kernel has no stanza", kernel(`{"debugger":true}`), nil, ""},
	{"a kernel may have no metadata", `{"name":"k","spec":{"argv":["python"],"language":"python"}}`, nil, ""},
	{"a local process proxy has no image", kernel(proxy(`{}`)), nil, ""},
	{"only these keys name images", kernel(proxy(`{"image":"x:1","Image_Name":"y:1","IMAGE_NAME":"z:1"}`)), nil, ""},
	{"a process proxy outside of metadata is not read", `{"spec":{"process_proxy":{"config":{"image_name":"x:1"}}}}`, nil, ""},

	{"the entry is null", `null`, nil, "the entry is null, not an object"},
	{"the entry is a list", `[1]`, nil, "the entry is a list, not an object"},
	{"the entry is a text", `"python"`, nil, "the entry is a string, not an object"},
	{"the entry is a number", `-1`, nil, "the entry is a number, not an object"},
	{"the entry is a boolean", `true`, nil, "the entry is a boolean, not an object"},
	{"the spec is null", `{"name":"k","spec":null}`, nil, "spec is null, not an object"},
	{"metadata is null", kernel(`null`), nil, "metadata is null, not an object"},
	{"metadata is a text", kernel(`"x"`), nil, "metadata is a string, not an object"},
	{"the process proxy is a text", kernel(`{"process_proxy":"x"}`), nil, "process_proxy is a string, not an object"},
	{"config is null", kernel(proxy(`null`)), nil, "process_proxy.config is null, not an object"},
	{"config is a list", kernel(provisioner(`[]`)), nil, "kernel_provisioner.config is a list, not an object"},

	{"the image is null", kernel(proxy(`{"image_name":null}`)), nil, "process_proxy.config.image_name is null, not a string"},
	{"the image is empty", kernel(proxy(image(""))), nil, "process_proxy.config.image_name is empty"},
	{"the image is space", kernel(proxy(image(" \n"))), nil, "process_proxy.config.image_name is empty"},
	{"the image is a list", kernel(proxy(`{"image_name":["a","b"]}`)), nil, "process_proxy.config.image_name is a list, not a string"},
	{"the image is a number", kernel(proxy(`{"image_name":7}`)), nil, "process_proxy.config.image_name is a number, not a string"},
	{"the image is an object", kernel(proxy(`{"image_name":{}}`)), nil, "process_proxy.config.image_name is an object, not a string"},
	{"the image is a boolean", kernel(proxy(`{"image_name":false}`)), nil, "process_proxy.config.image_name is a boolean, not a string"},
	{"a bad image does not take the executor's with it",
		kernel(proxy(`{"image_name":7,"executor_image_name":"e:1"}`)), []string{"e:1"}, "process_proxy.config.image_name is a number, not a string"},
	{"a bad executor's image does not take the image with it",
		kernel(proxy(`{"image_name":"a:1","executor_image_name":[]}`)), []string{"a:1"}, "process_proxy.config.executor_image_name is a list, not a string"},

	{"space around an image is dropped", kernel(proxy(image(" elyra/kernel-py:1\n"))), []string{"elyra/kernel-py:1"}, ""},
	{"a line break in an image is quoted", kernel(proxy(image("a:1\nb:1"))), nil, `process_proxy.config.image_name holds a control character: "a:1\nb:1"`},
	{"an escape in an image is quoted", kernel(proxy(image("a\x1b[31m"))), nil, `process_proxy.config.image_name holds a control character: "a\x1b[31m"`},
	{"a C1 control in an image is quoted", kernel(proxy(image("a\u009bb"))), nil, `process_proxy.config.image_name holds a control character: "a\u009bb"`},
	{"a long bad image is cut", kernel(proxy(image("\x00" + strings.Repeat("x", 4000)))), nil,
		`process_proxy.config.image_name holds a control character: "\x00` + strings.Repeat("x", 99) + `"`},
	{"an image of 4096 bytes is handed on", kernel(proxy(image(strings.Repeat("x", 4096)))), []string{strings.Repeat("x", 4096)}, ""},
	{"an image of 4097 bytes is not", kernel(proxy(image(strings.Repeat("x", 4097)))), nil, "process_proxy.config.image_name has 4097 bytes, more than 4096"},

	// C11: whether a name is a reference is for the puller to say.
	{"capitals are handed on", kernel(proxy(image("myDockerHub/myCustomKernelImage:tag"))), []string{"myDockerHub/myCustomKernelImage:tag"}, ""},
	{"a host in capitals is handed on", kernel(proxy(image("MyRegistry/kernel-py:1"))), []string{"MyRegistry/kernel-py:1"}, ""},
	{"a registry with a port is handed on", kernel(proxy(image("registry.local:5000/kernel-py:1"))), []string{"registry.local:5000/kernel-py:1"}, ""},
	{"a variable is handed on", kernel(proxy(image("${KERNEL_IMAGE}"))), []string{"${KERNEL_IMAGE}"}, ""},
	{"a URL is handed on", kernel(proxy(image("https://reg/x:1"))), []string{"https://reg/x:1"}, ""},
}

func TestKernelspecIsReadSoThat(t *testing.T) {
	for _, test := range shapes {
		t.Run(test.name, func(t *testing.T) {
			got, err := parseKernelspecs([]byte(`{"kernelspecs":{"k":`+test.spec+`}}`), shown)
			if err != nil {
				t.Fatal(err)
			}
			want := Answer{Images: test.images}
			if test.fault != "" {
				want.Warnings = []string{`kernelspec "k": ` + test.fault}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// allShapes is one answer with every shape, and a good kernelspec before, between and after them.
func allShapes() (body string, want Answer) {
	var entries []string
	add := func(key, spec string) { entries = append(entries, fmt.Sprintf("%q:%s", key, spec)) }
	for i, shape := range shapes {
		good := fmt.Sprintf("good:%02d", i)
		add(fmt.Sprintf("%02d-a", i), kernel(proxy(image(good))))
		add(fmt.Sprintf("%02d-b", i), shape.spec)
		want.Images = append(append(want.Images, good), shape.images...)
		if shape.fault != "" {
			want.Warnings = append(want.Warnings, fmt.Sprintf(`kernelspec "%02d-b": %s`, i, shape.fault))
		}
	}
	add("zz", kernel(proxy(image("last:1"))))
	want.Images = clean(append(want.Images, "last:1"))
	slices.Reverse(entries) // the order is by name, not as they come
	return `{"default":"python_kubernetes","kernelspecs":{` + strings.Join(entries, ",") + `}}`, want
}

func TestBadKernelspecsLeaveTheirNeighboursAlone(t *testing.T) {
	body, want := allShapes()
	got, err := parseKernelspecs([]byte(body), shown)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestKernelspecNameIsQuotedAndCut(t *testing.T) {
	name := "a\nb\x1b" + strings.Repeat("x", 200)
	key, _ := json.Marshal(name)
	got, err := parseKernelspecs([]byte(`{"kernelspecs":{`+string(key)+`:null}}`), shown)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{`kernelspec "a\nb\x1b` + strings.Repeat("x", 96) + `": the entry is null, not an object`}
	if diff := cmp.Diff(want, got.Warnings); diff != "" {
		t.Error(diff)
	}
}

func TestNoKernelspecsIsAnAnswerWithAWarning(t *testing.T) {
	got, err := parseKernelspecs([]byte(`{"default":"","kernelspecs":{}}`), shown)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Answer{Warnings: []string{"the gateway lists no kernelspecs"}}, got); diff != "" {
		t.Error(diff)
	}
}

// notKernelspecs are answers that are errors of the whole source.
var notKernelspecs = []struct{ name, body, want string }{
	{"an empty body", ``, "the answer is empty"},
	{"a body of space", " \r\n", "the answer is empty"},
	{"half a JSON", `{"default":"x","kernelspecs":{"k":{"name":"k","sp`, "the answer ends in the middle"},
	{"a JSON without its last bracket", `{"kernelspecs":{}`, "the answer ends in the middle"},
	{"a text", `Not here`, "the answer is not JSON"},
	{"a broken JSON", `{"kernelspecs":{"k":}}`, "the answer is not JSON"},
	{"a JSON that is too deep", `{"kernelspecs":{"k":` + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000) + `}}`, "the answer is not JSON"},
	{"two JSONs", `{"kernelspecs":{}}{}`, "more follows the JSON in the answer"},
	{"a bracket too much", `{"kernelspecs":{}}}`, "more follows the JSON in the answer"},
	{"text after the JSON", `{"kernelspecs":{}} secret`, "more follows the JSON in the answer"},
	{"another object", `{"version":"3.2.3"}`, noKernelspecs},
	{"the key in other letters", `{"KernelSpecs":{}}`, noKernelspecs},
	{"kernelspecs that are null", `{"kernelspecs":null}`, noKernelspecs},
	{"kernelspecs in a list", `{"kernelspecs":[{"name":"k"}]}`, noKernelspecs},
	{"kernelspecs that are a text", `{"kernelspecs":"k"}`, noKernelspecs},
	{"a list", `[]`, noKernelspecs},
	{"null", `null`, noKernelspecs},
	{"a number", `7`, noKernelspecs},
}

const noKernelspecs = "the answer is JSON without a kernelspecs object: is this the gateway's address?"

func TestIsNoListOfKernelspecs(t *testing.T) {
	for _, test := range notKernelspecs {
		t.Run(test.name, func(t *testing.T) {
			got, err := parseKernelspecs([]byte(test.body), shown)
			if diff := cmp.Diff(problem(test.want), err); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(Answer{}, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func FuzzKernelspecs(f *testing.F) {
	for _, shape := range shapes {
		f.Add([]byte(`{"kernelspecs":{"k":` + shape.spec + `}}`))
	}
	for _, body := range notKernelspecs {
		f.Add([]byte(body.body))
	}
	body, _ := allShapes()
	f.Add([]byte(body))
	f.Add([]byte(`{"kernelspecs":{"k":{},"k":null,"\u0000":7,"\ud800":[]}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		answer, err := parseKernelspecs(body, shown)
		if err != nil {
			if _, ours := err.(problem); !ours {
				t.Errorf("an error with foreign words: %v", err)
			}
			return
		}
		if diff := cmp.Diff(clean(answer.Images), answer.Images); diff != "" {
			t.Errorf("images that are not trimmed, or empty, or there twice: %s", diff)
		}
		for _, image := range answer.Images {
			if len(image) > maxImageLength || strings.ContainsFunc(image, unicode.IsControl) {
				t.Errorf("image %q", image)
			}
		}
		for _, warning := range answer.Warnings {
			if strings.ContainsFunc(warning, unicode.IsControl) {
				t.Errorf("a control character in %q", warning)
			}
		}
		again, _ := parseKernelspecs(body, shown)
		if diff := cmp.Diff(answer, again); diff != "" {
			t.Errorf("the second reading differs: %s", diff)
		}
	})
}
